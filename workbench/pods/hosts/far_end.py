"""What existing hosts run when a pod is made there and when it goes: standard library, and a `folders.py` sent along.

Run as `python - JSON`; ends only processes with the pod's own mark and what they started, and removes only the folder
that `enter` made.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workbench.base.files.folders import weakness

ANSWER = "@workbench-host "
"""What the answer's line begins with; a login may print other things before it."""

_MARK = "WORKBENCH_POD"
_GRACE_S = 1.5
_KILL_S = 1.0
_LOG_LINES = 200


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; return the answer, with the key `error` where it cannot be done."""
    os.umask(0o077)
    try:
        return enter(**request["enter"]) if "enter" in request else leave(**request["leave"])
    except OSError as error:
        return {"error": f"{error.filename or 'the host'}: {error.strerror or error}"}
    except ValueError as error:
        return {"error": str(error)}


def enter(root: str, folder: str, pod: str, packages: list[str]) -> dict[str, Any]:
    """Make the pod's folder `root/folder/pod` and say what this host is."""
    own = Path(root).expanduser().resolve() / folder
    if why := weakness(own.parent):
        raise ValueError(why)
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        own.mkdir(0o700)
    except FileExistsError:  # made for another pod of this cluster: hosts may share their home folders
        there = os.lstat(own)
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid() or stat.S_IMODE(there.st_mode) & 0o077:
            raise ValueError(f"{own} is there already and is not ours alone") from None
    place = own / pod
    place.mkdir(0o700)
    return {
        "root": str(place),
        "python": sys.executable,
        "versions": {"python": sys.version.split()[0].rstrip("+"), **_versions(packages)},
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": _memory_gib(),
        "daemon": [*os.environ.get("SSH_CONNECTION", "").split()[2:], _read("/proc/sys/kernel/random/boot_id").strip()],
    }


def leave(root: str, folder: str, pod: str) -> dict[str, Any]:
    """End what bears the pod's mark, remove the pod's folder, and the cluster's once no pod is left there."""
    own = Path(root).expanduser().resolve() / folder
    place = own / pod
    deadline = time.monotonic() + _GRACE_S
    asked: set[int] = set()
    while (left := _ours(str(place))) and time.monotonic() < deadline + _KILL_S:
        forced = time.monotonic() >= deadline
        for pid in left:
            if forced or pid not in asked:
                _send(pid, signal.SIGKILL if forced else signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.05)
    log = _read(place / "agent.log").splitlines()[-_LOG_LINES:]
    shutil.rmtree(place, ignore_errors=True)
    if not list(own.glob("pod-*")):
        shutil.rmtree(own, ignore_errors=True)
    return {"ended": len(asked), "left": sorted(left), "log": log, "there": place.exists()}


def _ours(root: str) -> set[int]:
    """Find the live processes with the pod's mark and all that descend from them; never this one or those above it."""
    parents = {int(entry.name): parent for entry in Path("/proc").glob("[0-9]*") if (parent := _parent(entry))}
    mark = f"{_MARK}={root}".encode()
    ours = {pid for pid in parents if mark in _environment(pid)}
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= children
        grown = bool(children)
    above = os.getpid()
    while above in parents:
        ours.discard(above)
        above = parents[above]
    return ours


def _parent(entry: Path) -> int:
    """Return a live process's parent; 0 for a zombie and for one that has gone."""
    text = _read(entry / "stat")
    words = text[text.rindex(")") + 2 :].split() if text else ["X"]  # the name before it may hold blanks and brackets
    return 0 if words[0] in "ZX" else int(words[1])


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):  # another user's, or gone
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _versions(packages: list[str]) -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _gpus() -> int:
    """Count the GPUs that NVIDIA's driver lists and this login may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip()])
    if shutil.which("nvidia-smi") is None:
        return 0
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20)
        return len([line for line in done.stdout.split(b"\n") if line.startswith(b"GPU ")])
    return 0


def _memory_gib() -> float:
    lines = [line.split() for line in _read("/proc/meminfo").splitlines()]
    return next((int(words[1]) / 2**20 for words in lines if words[0] == "MemTotal:"), 0.0)


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


if __name__ == "__main__":
    print(ANSWER + json.dumps(main(json.loads(sys.argv[1]))))
