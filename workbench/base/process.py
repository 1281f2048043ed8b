"""Processes as Linux's `/proc` shows them: find those that are ours, and signal exactly those.

A process is known by its pid and its start time together: pids are used again, and what merely looks like ours is left
alone. Without `/proc` everything here finds nothing. Standard library only, for the agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

POD_MARK = "WORKBENCH_POD"
"""The variable, in every process of a pod, that holds the pod's folder."""
FORK_SERVER_NAME = "fork-server"
"""The name beside the pods' folders that marks the local fork server in place of a pod's folder."""
RUN_MARK = "WORKBENCH_RUN"
"""The variable, in every process of a run, that holds the run's id."""
RANK_MARK = "WORKBENCH_RANK_DIR"
"""The variable, in every process of a rank, that holds the rank's folder."""
LEASE_S = 300.0
"""Seconds that what runs on pods outlives a keeper that fell silent: breaks of two minutes, with room to come back."""
OUTPUT_PIPE = ".{}.pipe"
"""The name of the pipe in a rank's folder that somebody empties into the log of the same stream."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_WORLD = ("Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One process at one moment; equal to every other look at the same process."""

    pid: int
    start_time: int
    """When it started, in clock ticks since boot."""
    parent: int = field(default=0, compare=False)
    session: int = field(default=0, compare=False)
    """Its session: the pid of whoever called setsid."""
    zombie: bool = field(default=False, compare=False)

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return find(self.pid) == self

    def send(self, number: int) -> bool:
        """Signal this process, and no other that got its pid in the meantime; return whether it was there."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except OSError:  # a kernel or sandbox without pidfd: the gap between look and kill stays
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    rank: int
    local_rank: int
    pod: str


def pod_name() -> str:
    """Return the name of the pod that this process was started on; "this pod" outside of one."""
    return Path(os.environ.get(POD_MARK, "this pod")).name


def _stat(pid: int) -> list[bytes]:
    """Return the fields of a process's `stat` from its state on; none where it is gone."""
    try:
        return _read_stat(pid)
    except OSError:
        return []


def _read_stat(pid: int) -> list[bytes]:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # The name stands in parentheses and may hold anything, parentheses too: what counts follows the last one.
    return text[text.rfind(b")") + 2 :].split()


def look_up(pid: int) -> Process | None:
    """Return the process that has this pid now, a zombie too, or None."""
    if not (fields := _stat(pid)):
        return None
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X"))


def find(pid: int) -> Process | None:
    """Return the live process that has this pid now, or None."""
    process = look_up(pid)
    return None if process is None or process.zombie else process


def process_start_time(pid: int) -> int | None:
    """Return when a live process started, in clock ticks since boot; None where it is gone, or without `/proc`."""
    process = find(pid)
    return process.start_time if process is not None else None


def is_alive(pid: int, start_time: int | None) -> bool:
    """Whether the very process that had this pid and start time still runs."""
    if start_time is None:  # no /proc on this system: the pid alone must do
        return _is_taken(pid)
    try:
        fields = _read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (
        OSError
    ):  # this process may have no free descriptor; that says nothing of the other process
        return _is_taken(pid)
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == start_time


def _is_taken(pid: int) -> bool:
    """Whether some process has this pid; needs no descriptor."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def boot_id() -> str:
    """Return what names this start of this machine; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return _read_boot_id()
    return ""


@functools.cache
def _read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def control_groups(pid: int | str = "self") -> dict[str, str]:
    """Return the path of a process's control group by controller, "" for version 2; none where it is gone."""
    try:
        lines = (
            Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return {}
    split = (line.split(":", 2) for line in lines)
    return {
        name: path.lstrip("/") for _, controllers, path in split for name in controllers.split(",")
    }


def world(pid: int | str = "self") -> dict[str, str]:
    """Return what a process cannot take on from another: its user, rights, processors, namespaces and control group."""
    rights = {name: value for name, value in status(pid).items() if name in _WORLD}
    namespaces = {
        f"namespace {entry.name}": str(entry.readlink())
        for entry in Path(f"/proc/{pid}/ns").iterdir()
    }
    return {**rights, **namespaces, "control group": Path(f"/proc/{pid}/cgroup").read_text()}


def status(pid: int | str = "self") -> dict[str, str]:
    """Return the lines of a process's `status` in `/proc`, by name; OSError where it is gone."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def peer(line: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of whoever opened the other end of a Unix socket, as the kernel tells them."""
    credentials = struct.Struct("3i")
    pid, uid, _ = credentials.unpack(
        line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    )
    return pid, uid


def process_table() -> dict[int, Process]:
    """Return all processes by pid; about 15 microseconds each."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208 (names, not paths)
    except OSError:
        return {}
    looks = (look_up(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in looks if process is not None}


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` that are in the table and of all that descend from them."""
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
    """Return these processes and all below them by pid, without a look at all; new brothers may be missed."""
    if not Path(
        f"/proc/self/task/{os.getpid()}/children"
    ).exists():  # a kernel without CONFIG_PROC_CHILDREN
        return process_table()
    table: dict[int, Process] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table or (process := look_up(pid)) is None:
            continue
        table[pid] = process
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting.extend(map(int, children.read_bytes().split()))
    return table


def live_descendants(root: int) -> list[Process]:
    """Return the live descendants of a process, the oldest first: whoever ends them so closes connections first."""
    # Whom the quick look misses counts at the end alone.
    family = _live_below(root, family_table([root])) or _live_below(root, process_table())
    return sorted(family, key=lambda process: (process.start_time, process.pid))


def _live_below(root: int, table: Mapping[int, Process]) -> list[Process]:
    return [table[pid] for pid in descendants(table, [root]) - {root} if not table[pid].zombie]


def ancestors(table: Mapping[int, Process], pid: int) -> set[int]:
    """Return the pids above this one, itself among them."""
    line: set[int] = set()
    while pid in table and pid not in line:
        line.add(pid)
        pid = table[pid].parent
    return line


def marks(pid: int, names: Collection[str] = (POD_MARK, RUN_MARK, RANK_MARK)) -> dict[str, str]:
    """Read these variables from the environment that a process was executed with; none where we may not look."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0"))
    return {name: value for name, _, value in pairs if name in names}


def with_mark(name: str, values: Collection[str]) -> list[Process]:
    """Return the live processes started with `name` as one of the values in their environment, but this one."""
    others = (
        process
        for process in process_table().values()
        if process.pid != os.getpid() and not process.zombie
    )
    return [process for process in others if marks(process.pid, [name]).get(name) in values]


def pod_of(pid: int) -> str:
    """Return the folder of the pod that a process belongs to; empty where it belongs to none.

    A fork of the local fork server shows the mark with which that was executed. The working
    directory of such a fork tells its pod. The fork server itself has its own mark.
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
    """Return the live processes of the pods with these folders, but this one."""
    table = process_table().values()
    others = (process for process in table if process.pid != os.getpid() and not process.zombie)
    return [process for process in others if pod_of(process.pid) in roots]


def end_all(
    listing: Callable[[], Iterable[Process]], *, grace_s: float, kill_s: float = 1.0
) -> list[Process]:
    """End every listed process: TERM, then KILL to those left after the grace; list again until none is left."""
    asked: set[Process] = set()
    start_s = time.monotonic()
    while left := list(listing()):
        waited_s = time.monotonic() - start_s
        if waited_s > grace_s + kill_s:
            return left
        for process in left:
            if waited_s >= grace_s:
                process.send(signal.SIGKILL)
            elif process not in asked:
                process.send(signal.SIGTERM)
                asked.add(process)
        time.sleep(0.02)
    return []


def activity(pid: int) -> tuple[float, bool]:
    """Return the CPU seconds of a process and of its children that have ended, and whether a signal has stopped it."""
    if not (fields := _stat(pid)):
        return 0.0, False
    return sum(map(int, fields[11:15])) / _TICKS_PER_S, fields[0] in (b"T", b"t")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError):
        return bool(int(status(pid)["SigCgt"], 16) >> (number - 1) & 1)
    return False


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if the parent is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of every orphan below this process, so that none gets away from us."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def offer_to_oom_killer() -> None:
    """Be ended before the notebook, the keeper and the agent are, when memory runs out. Inherited by children."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def open_output(folder: Path) -> None:
    """Put /dev/null on descriptor 0, and on 1 and 2 the pipes of a rank that somebody empties, or else its logs."""
    _put(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        _put(_open_log(folder, name), number)


def _open_log(folder: Path, name: str) -> int:
    with contextlib.suppress(OSError):  # ENXIO without a reader
        pipe = os.open(
            folder / OUTPUT_PIPE.format(name), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        )
        os.set_blocking(pipe, True)
        return pipe
    return os.open(folder / f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


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
