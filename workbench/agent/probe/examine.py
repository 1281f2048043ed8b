"""Print a pod's resources as JSON: `python -m workbench.agent.probe.examine ADDRESS [FOLDER]`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workbench.agent.gpus import GpuWatch
from workbench.agent.machine import (
    address_for_others,
    interface_of,
    interfaces,
    own_addresses,
)
from workbench.agent.site.nccl import own_interfaces
from workbench.agent.site.setup import setup_variables
from workbench.base.files.records import facts_of
from workbench.base.machine.limits import cores, memory_gib, most_memory_gib
from workbench.base.messages.wire import ask_if_there
from workbench.base.process import kernel_link, process_table
from workbench.base.versions import installed_versions

_GIB = 1024**3
_DRIVER_S = 10.0  # a driver without persistence starts for some seconds
_AGENT_S = 5.0
_BUILD_LOCK_S = 30.0  # a build starts a compiler within a second of taking the lock


def examine(address: str, folder: Path) -> dict[str, object]:
    # Ranks import this module for their locks.
    from workbench.agent.probe.toolkit import installed_ops, nvcc_version, torch_build

    gpus = [gpu for gpu in GpuWatch(patience_s=_DRIVER_S).latest() if "error" not in gpu]
    gpu_gib, memory_limit_gib = limits(gpus)
    return {
        "time_s": time.time(),
        "interface": interface_of(address),
        "interfaces": interfaces(),
        "own_interfaces": own_interfaces(os.environ),
        "address": address,
        "own_addresses": own_addresses(address),
        "address_for_others": address_for_others(address),
        "versions": installed_versions(),
        "gpus": gpus,
        "gpu_gib": gpu_gib,
        "memory_gib": memory_gib("MemAvailable"),
        "memory_limit_gib": memory_limit_gib,
        "process_gib": process_gib(folder),
        "disk": _room(folder),
        "shm": _room(Path("/dev/shm")),
        "cores": cores(),
        "locks": list(compile_locks(extensions_folder())),
        "torch_build": torch_build(),
        "nvcc": nvcc_version() if gpus else "",
        "ops": installed_ops(extensions_folder()),
    }


def limits(gpus: Sequence[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Return the most GPU and host memory that a job can have here, regardless of current use."""
    gpu_gib = [gpu["total_gib"] for gpu in gpus if "total_gib" in gpu]
    return min(gpu_gib, default=None), most_memory_gib()


def process_gib(folder: Path) -> float | None:
    """Return the memory of a process with the imports of a rank. None: no agent measured one."""
    hello = ask_if_there(folder / "agent.sock", {"op": "hello"}, timeout_s=_AGENT_S)
    return None if hello is None else float(hello["process_bytes"]) / _GIB or None


def extensions_folder() -> Path:
    """Return the folder where torch compiles ops."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    return Path.home() / ".cache" / "torch_extensions"


def compile_locks(folder: Path) -> Iterator[dict[str, object]]:
    """Find the lock files of compiled ops. A build waits silently until the lock is removed."""
    locks = [path for path in folder.glob("**/lock") if path.is_file()]
    if not locks:
        return
    busy = {kernel_link(f"/proc/{pid}/cwd") for pid in process_table()}
    for path in locks:
        lock = facts_of(path)
        if lock is None:  # the build has just ended
            continue
        yield {
            "path": str(path),
            "age_s": max(0.0, time.time() - lock.st_mtime),
            "busy": str(path.parent.resolve()) in busy,
        }


def clear_stale_locks() -> None:
    """Remove the locks of killed builds: torch waits silently for the lock of a compiled op."""
    while True:
        locks = compile_locks(extensions_folder())
        idle = [lock for lock in locks if not lock["busy"]]
        if not idle:
            return
        for lock in idle:
            path = str(lock["path"])
            if float(str(lock["age_s"])) > _BUILD_LOCK_S:
                Path(path).unlink(missing_ok=True)  # another rank of this pod may have been faster
                why = f"no build works there, and it is older than {_BUILD_LOCK_S:g} s"
                print(f"removed the stale build lock {path}: {why}", file=sys.stderr, flush=True)
            else:
                print(f"waiting for the build that holds {path}", file=sys.stderr, flush=True)
                time.sleep(1.0)


def _room(folder: Path) -> dict[str, float] | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return {"free_gib": usage.free / _GIB, "total_gib": usage.total / _GIB}


def main(argv: Sequence[str] | None = None) -> int:
    address, *rest = sys.argv[1:] if argv is None else argv
    folder = Path(rest[0]) if rest else Path()
    # The pod may have taken some of the GPUs of its host.
    os.environ.update(setup_variables(folder))
    facts = examine(address, folder)
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
