"""Find our processes in Linux's `/proc`, and signal no other process.

A process is identified by its pid and start time: pids are reused, and a process with only the pid
is left alone. Without `/proc` no function finds a process. Standard library only, for the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POD_MARK = "WORKBENCH_POD"
"""Variable with the pod's folder, in every process of a pod."""
POD_NAME = "WORKBENCH_POD_NAME"
"""Variable with the name of the pod, in every process of a rank."""
SETUP_FILE = "setup.json"
"""Name of the file in a pod's folder with the variables that setup lines have set."""
FORK_SERVER_NAME = "fork-server"
"""Name in place of a pod's folder, as the mark of the local fork server."""
FORK_SERVER_SOCKET = "WORKBENCH_FORK_SERVER"
"""Variable with the path of the fork server's socket, only in the agent's environment."""
RUN_MARK = "WORKBENCH_RUN"
"""Variable with the run's id, in every process of a run."""
RANK_MARK = "WORKBENCH_RANK_DIR"
"""Variable with the rank's folder, in every process of a rank."""
LEASE_S = 300.0
"""Lease in seconds: processes on pods outlive a silent keeper for this time.

Interruptions of two minutes leave time to reconnect.
"""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORLD = ("Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process at a moment; equal to every other record of the same process."""

    pid: int
    start_time: int
    """Start time, in clock ticks since boot."""
    parent: int = field(default=0, compare=False)
    session: int = field(default=0, compare=False)
    """Session id: the pid of the process that called setsid."""
    zombie: bool = field(default=False, compare=False)

    def is_alive(self) -> bool:
        """Whether the process still runs; False for a zombie."""
        return find(self.pid) == self

    def send(self, number: int) -> bool:
        """Signal the process, never a later process with the pid. Return whether it was alive."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        # A kernel or sandbox without pidfd: the gap between check and kill remains.
        except OSError:
            handle = -1
        try:
            if not self.is_alive():
                return False
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            if handle >= 0:
                os.close(handle)
        return True

    def send_to_main_thread(self, number: int) -> bool:
        """Signal the main thread of the process. Return whether the process was alive.

        A signal to a process is handled by any thread. Without `tgkill` in the C library (glibc
        before 2.30), any thread handles this signal too.
        """
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
        if tgkill is None:
            return self.send(number)
        return self.is_alive() and tgkill(self.pid, self.pid, number) == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    rank: int
    local_rank: int
    pod: str


def pod_name() -> str:
    """Return the name of the calling rank's pod; "this pod" outside a pod."""
    return os.environ.get(POD_NAME, "this pod")


def kernel_text(path: Path | str) -> str:
    """Return a file of `/proc` or `/sys`; "" for an ended process or an absent or closed file."""
    try:
        return os.fsdecode(Path(path).read_bytes())
    except OSError:
        return ""


def kernel_link(path: Path | str) -> str:
    """Return the target of a link of `/proc`; "" for an ended or another user's process."""
    try:
        return os.readlink(path)  # noqa: PTH115 (a text, as of a socket)
    except OSError:
        return ""


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process's `stat` from the state on; [] for an ended process."""
    try:
        return _read_stat(pid)
    except OSError:
        return []


def _read_stat(pid: int) -> list[bytes]:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # The name is in parentheses and may hold parentheses too. The fields follow the last.
    return text[text.rfind(b")") + 2 :].split()


def look_up(pid: int) -> Process | None:
    """Return the process with a pid now, also a zombie, or None."""
    if not (fields := _stat(pid)):
        return None
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X"))


def find(pid: int) -> Process | None:
    """Return the live process with a pid now, or None."""
    process = look_up(pid)
    return None if process is None or process.zombie else process


def send_signal(pid: int, number: int) -> bool:
    """Signal a watched process. Return whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def process_start_time(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot.

    None for an ended process, or without `/proc`.
    """
    process = find(pid)
    return process.start_time if process is not None else None


def is_alive(pid: int, start_time: int | None) -> bool:
    """Whether the process with a pid and start time still runs."""
    if start_time is None:  # no /proc on this system: only the pid is known
        return _is_taken(pid)
    try:
        fields = _read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    # This process may have no free descriptor, which proves nothing about the other process.
    except OSError:
        return _is_taken(pid)
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == start_time


def _is_taken(pid: int) -> bool:
    """Whether any process has a pid. Needs no descriptor."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def boot_id() -> str:
    """Return the id of the machine's present boot; "" on a system without boot ids."""
    return kernel_text("/proc/sys/kernel/random/boot_id").strip()


def control_groups(pid: int | str = "self") -> dict[str, str]:
    """Return the paths of a process's control groups by controller, with "" for version 2.

    Empty for an ended process.
    """
    split = (line.split(":", 2) for line in kernel_text(f"/proc/{pid}/cgroup").splitlines())
    return {
        name: path.lstrip("/") for _, controllers, path in split for name in controllers.split(",")
    }


def world(pid: int | str = "self") -> dict[str, str]:
    """Return a process's user, rights, processors, namespaces and control group.

    No other process can take on these properties.
    """
    rights = {name: value for name, value in status_of(pid).items() if name in _WORLD}
    namespaces = {
        f"namespace {entry.name}": str(entry.readlink())
        for entry in Path(f"/proc/{pid}/ns").iterdir()
    }
    return {**rights, **namespaces, "control group": Path(f"/proc/{pid}/cgroup").read_text()}


def status_of(pid: int | str = "self") -> dict[str, str]:
    """Return the lines of a process's `status` in `/proc`, by name; {} for an ended process."""
    lines = kernel_text(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def peer(line: socket.socket) -> tuple[int, int]:
    """Return the pid and user id at the other end of a Unix socket, as reported by the kernel."""
    credentials = struct.Struct("3i")
    pid, uid, _ = credentials.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return pid, uid


def process_table() -> dict[int, Process]:
    """Return all processes by pid, in about 15 microseconds per process."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208 (names, not paths)
    except OSError:
        return {}
    looks = (look_up(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in looks if process is not None}


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the pids of the `roots` in the table, and of all descendants."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    family: set[int] = set()
    waiting = [pid for pid in roots if pid in table]
    while waiting:
        pid = waiting.pop()
        if pid not in family:
            family.add(pid)
            waiting.extend(children.get(pid, ()))
    return family


def family_table(roots: Iterable[int]) -> dict[int, Process]:
    """Return processes and all descendants by pid, without reading the whole table.

    Descendants started meanwhile may be missing.
    """
    # Some kernels are built without CONFIG_PROC_CHILDREN.
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return process_table()
    table: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table or (process := look_up(pid)) is None:
            continue
        table[pid] = process
        for children in glob.glob(f"/proc/{pid}/task/*/children"):  # noqa: PTH207 (it may end)
            waiting.extend(map(int, kernel_text(children).split()))
    return table


def live_descendants(root: int) -> list[Process]:
    """Return the live descendants of a process, oldest first.

    Ending processes in the returned order closes connections first.
    """
    # Read the whole table only if the fast way finds none: a missed process matters only then.
    family = _live_below(root, family_table([root])) or _live_below(root, process_table())
    return sorted(family, key=lambda process: (process.start_time, process.pid))


def _live_below(root: int, table: Mapping[int, Process]) -> list[Process]:
    return [table[pid] for pid in descendants(table, [root]) - {root} if not table[pid].zombie]


def ancestors(table: Mapping[int, Process], pid: int) -> set[int]:
    """Return the pids of a process and all ancestors."""
    line: set[int] = set()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].parent
    return line


def marks(pid: int, names: Collection[str] = (POD_MARK, RUN_MARK, RANK_MARK)) -> dict[str, str]:
    """Return variables from a process's environment at the start; {} without permission."""
    pairs = (item.partition("=") for item in kernel_text(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in pairs if name in names}


def with_mark(name: str, values: Collection[str]) -> list[Process]:
    """Return the other live processes started with any of the values in variable `name`."""
    others = (
        process
        for process in process_table().values()
        if process.pid != os.getpid() and not process.zombie
    )
    return [process for process in others if marks(process.pid, [name]).get(name) in values]


def pod_of(pid: int) -> str:
    """Return the folder of a process's pod, or "" for a process outside the pods.

    A fork of the local fork server has the fork server's mark, and works in the pod's folder.
    The fork server itself has a separate mark.
    """
    mark = marks(pid, [POD_MARK]).get(POD_MARK, "")
    if Path(mark).name != FORK_SERVER_NAME:
        return mark
    pods = Path(mark).parent
    try:
        folder = Path(f"/proc/{pid}/cwd").readlink().relative_to(pods.resolve())
    except (OSError, ValueError):
        return mark
    return str(pods / folder.parts[0].removesuffix(" (deleted)")) if folder.parts else mark


def of_pods(roots: Collection[str]) -> list[Process]:
    """Return the live processes of the pods with the given folders, except the calling process."""
    table = process_table().values()
    others = (process for process in table if process.pid != os.getpid() and not process.zombie)
    return [process for process in others if pod_of(process.pid) in roots]


def end_all(
    listing: Callable[[], Iterable[Process]], *, grace_s: float, kill_s: float = 5.0
) -> list[Process]:
    """End every listed process: SIGTERM, then SIGKILL after the grace. Repeat until none is listed.

    Returns the processes left `kill_s` after the first SIGKILL.
    """
    asked: set[Process] = set()
    start_s = time.monotonic()
    killed_s = float("inf")
    while left := list(listing()):
        now_s = time.monotonic()
        if now_s - killed_s > kill_s:
            return left
        for process in left:
            if now_s - start_s >= grace_s:
                process.send(signal.SIGKILL)
                killed_s = min(killed_s, now_s)
            elif process not in asked:
                process.send(signal.SIGTERM)
                asked.add(process)
        time.sleep(0.02)
    return []


def activity(pid: int) -> tuple[float, bool]:
    """Return the CPU seconds of a process and ended children, and whether it is stopped."""
    if not (fields := _stat(pid)):
        return 0.0, False
    return sum(map(int, fields[11:15])) / _TICKS_PER_S, fields[0] in (b"T", b"t")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    return bool(int(status_of(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def close_descriptors(kept: Collection[int]) -> None:
    """Close the caller's descriptors above 2, except `kept`: readers of pipes wait for the end."""
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 (names, not paths)
    stays = {2, *(number for number in kept if number > 2), highest + 1}
    for low, high in itertools.pairwise(sorted(stays)):
        os.closerange(low + 1, high)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill the caller when the parent dies. Exit now if the parent is dead."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of every orphan below the caller, so no orphan escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def write_no_core_dump() -> None:
    """Keep the memory of the caller and its children, with all secrets, out of core files.

    A program that needs a core file raises its own soft limit `RLIMIT_CORE` again.
    """
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def offer_to_oom_killer() -> None:
    """Let the kernel end the caller before notebook, keeper and agent when memory runs out.

    Children inherit the setting.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def rank_log(attempt: int, rank: int, stream: str) -> str:
    """Return the path of a rank's log below the folder of logs, here and on a pod.

    `stream` is stdout, stderr or `order`, the record of the alternation of both.

    Example:
        >>> rank_log(1, 0, "stdout")
        'attempt-1/rank-0.stdout.log'
    """
    return f"attempt-{attempt}/rank-{rank}.{stream}.log"


def output_pipe(log: Path) -> Path:
    """Return the pipe from which the agent fills a log of a rank."""
    return log.with_suffix(".pipe")


def open_output(logs: Sequence[Path]) -> None:
    """Redirect descriptor 0 to /dev/null, 1 and 2 to the pipes of two logs if read, else to logs.

    Args:
        logs: Logs of standard output and standard error.
    """
    _put(os.open(os.devnull, os.O_RDONLY), 0)
    for number, log in enumerate(logs, start=1):
        _put(_open_log(log), number)


def _open_log(log: Path) -> int:
    with contextlib.suppress(OSError):  # ENXIO: the pipe has no reader
        pipe = os.open(output_pipe(log), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        os.set_blocking(pipe, True)
        return pipe
    return os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _put(opened: int, number: int) -> None:
    os.dup2(opened, number)
    os.close(opened)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}"
        )
