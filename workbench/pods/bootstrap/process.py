"""The keeper's side of a local pod's worker process: start, adopt and clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base import entries
from workbench.base.child import HOME, start
from workbench.base.files import read_json, records
from workbench.base.json_values import as_int
from workbench.base.process import (
    Process,
    end_all,
    kernel_link,
    kernel_text,
    of_pods,
    process_table,
)
from workbench.base.redact import is_secret_name
from workbench.pods.bootstrap.guardian import NOTE, WorkerConfig
from workbench.pods.bootstrap.machine import MemoryLimit
from workbench.pods.bootstrap.pod_main import can_be_set

_LINES_SHOWN = 20
_WORKER_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_SESSION_VARIABLES = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "ALL_PROXY",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
_SITE_VARIABLES = frozenset(
    (
        "CC",
        "CFLAGS",
        "CPATH",
        "CXX",
        "CXXFLAGS",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LDFLAGS",
        "LIBRARY_PATH",
        "LOADEDMODULES",
        "MAX_JOBS",
        "MODULEPATH",
        "MODULESHOME",
        "TORCH_CUDA_ARCH_LIST",
        "TRITON_CACHE_DIR",
        "WORK",
    )
)
"""Variables by which a site names its compilers, modules and folders."""
_SITE_PREFIXES = (
    "CUDA",
    "FI_",
    "GLOO_",
    "HCOLL_",
    "HFI_",
    "IBV_",
    "I_MPI_",
    "MLX5_",
    "MPICH_",
    "NCCL_",
    "NVCC_",
    "NVSHMEM_",
    "OFI_NCCL_",
    "OMPI_MCA_",
    "PMIX_MCA_",
    "PRTE_MCA_",
    "PSM",
    "RDMAV_",
    "SHARP_",
    "SLINGSHOT_",
    "TORCH_NCCL_",
    "UCX_",
)
_SCRATCH = ("SCRATCH", "TMPDIR")
"""Parts of the names of variables with a scratch folder: `PSCRATCH`, `SLURM_TMPDIR`, …"""
_ASSIGNED = frozenset(("CUDA_VISIBLE_DEVICES",))
"""Variables that differ from pod to pod."""


class AdoptedProcess:
    """The part of `Popen` that we use, for a worker of another keeper: not a child of ours."""

    stdin = None
    returncode = None

    def __init__(self, root: Path):
        """Find the guardian of a pod by the note in the pod's folder."""
        note = read_json(root / NOTE)
        pid, start_time = as_int(note.get("pid")), as_int(note.get("start_time"))
        self._process: Process | None = None
        if pid is not None and start_time is not None:
            self._process = Process(pid, start_time)

    def poll(self) -> int | None:
        """Return None while the process runs or cannot be checked, else 0.

        The exit code is unknown.
        """
        if self._process is None:
            return 0
        if self._process.is_alive() or not _can_look():
            return None
        return 0

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def wait(self, timeout: float = 5.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.02)
        return 0

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.send(number)


def _can_look() -> bool:
    """Return whether a file descriptor is free, to read the state of another process."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@dataclass(slots=True)
class LocalWorker:
    name: str
    root: str
    log: Path
    process: subprocess.Popen[bytes] | AdoptedProcess
    """The process; its stdin stays open for as long as the keeper lives."""
    started_s: float
    address: str = ""
    """Address of the pod; empty for a worker of another keeper."""

    @classmethod
    def adopted(cls, root: Path) -> LocalWorker:
        """Return the worker of a pod that another keeper started, by the folder of the pod."""
        log = root.with_name(f"{root.name}.log")
        return cls(
            name=root.name,
            root=str(root),
            log=log,
            process=AdoptedProcess(root),
            started_s=time.monotonic(),
        )

    @classmethod
    def start(cls, config: WorkerConfig, limit: MemoryLimit | None = None) -> LocalWorker:
        """Start the process, under a limit if given, and write its configuration to stdin.

        The configuration holds the token.
        """
        with records.open_to_append(Path(config.log)) as log:
            process = start(
                "-m",
                entries.GUARDIAN,
                stdin=subprocess.PIPE,
                bufsize=0,  # else closing the pipe to a dead worker would try to write once more
                stdout=log,
                stderr=log,
                cwd=Path(config.root).parent,
                env={**_pick(_WORKER_VARIABLES), "PYTHONPATH": HOME},
            )
        assert process.stdin is not None
        # The process may have died already; the watch reports how.
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            # The process waits for its configuration and has started nothing yet.
            if limit is not None:
                limit.take(process.pid)
            process.stdin.write(config.to_line())
        return cls(
            name=config.name,
            root=config.root,
            log=Path(config.log),
            process=process,
            started_s=time.monotonic(),
            address=config.address,
        )

    def status(self) -> str:
        line = tail_of(self.log, 1) or "none"
        return f"started {time.monotonic() - self.started_s:.0f} s ago, last log line: {line}"

    def exit_message(self) -> str:
        code = self.process.returncode
        lived = f"{time.monotonic() - self.started_s:.1f} s after its start"
        if code is None:
            how = "has ended"
            lived = "without a known cause, as an earlier keeper had started the pod"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name},"
        else:
            how = f"ended with exit code {code},"
        lines = tail_of(self.log, _LINES_SHOWN) or "(nothing)"
        return f"{self.name} {how} {lived}. Last lines of {self.log}:\n{lines}"


def session_environment() -> dict[str, str]:
    """Return the environment of a pod's sessions: search path, caches, proxies, the site's own."""
    own = {name: value for name, value in os.environ.items() if is_session_variable(name)}
    programs = Path(sys.executable).parent
    search_path = own.get("PATH", os.defpath)
    own["PATH"] = f"{programs}{os.pathsep}{search_path}"
    usable = {name: value for name, value in own.items() if can_be_set(value)}
    return {**usable, "SHLVL": "1"}


def left_out(more: Mapping[str, str] | None = None) -> str:
    """Return that some variables do not reach the sessions, or nothing.

    Args:
        more: Variables beside those of this machine. Default: none.
    """
    own = {name: value for name, value in os.environ.items() if is_session_variable(name)}
    wanted = {**own, **(more or {})}
    names = sorted(name for name, value in wanted.items() if not can_be_set(value))
    if not names:
        return ""
    return (
        f"left out of the pods: {', '.join(names)}. sshd takes no quotes, backslashes or line"
        " breaks; use PodSpec(env=…)"
    )


def is_session_variable(name: str) -> bool:
    """Return whether sessions take over a variable from their machine.

    Example:
        >>> is_session_variable("NCCL_IB_HCA"), is_session_variable("CUDA_VISIBLE_DEVICES")
        (True, False)
    """
    if name in _SESSION_VARIABLES or name in _SITE_VARIABLES:
        return True
    is_site_s = name.startswith(_SITE_PREFIXES) or any(part in name for part in _SCRATCH)
    return is_site_s and name not in _ASSIGNED and not is_secret_name(name)


def tail_of(path: Path, lines: int | None = None) -> str:
    """Return the last lines of a file, or all of its end; "" for a missing file."""
    with contextlib.suppress(OSError):
        text = records.read_end(path).decode(errors="backslashreplace")
        return text if lines is None else "\n".join(text.splitlines()[-lines:])
    return ""


def _pick(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def unsettled_guardians(folder: Path) -> list[Process]:
    """Return the guardians started in a folder, including guardians without a pod folder so far."""
    guardians = []
    for process in process_table().values():
        proc = f"/proc/{process.pid}"
        if process.zombie or kernel_link(f"{proc}/cwd") != str(folder.resolve()):
            continue
        if entries.GUARDIAN in kernel_text(f"{proc}/cmdline"):
            guardians.append(process)
    return guardians


def sweep(roots: Sequence[str]) -> None:
    """Kill the remaining processes of pods whose worker was killed."""
    if roots:
        end_all(lambda: of_pods(roots), grace_s=0.0)
