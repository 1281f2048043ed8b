"""Processes as `/proc` shows them: find those that are ours, and signal exactly those.

A process is named by its pid and its start time, never by its name or command line: pids are used again. Nothing
here decides who is to be ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Process",
    "ancestors",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "look_up",
    "marks",
    "memory",
    "offer_to_oom_killer",
    "open_output",
    "process_table",
    "send",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MARKS = ("WORKBENCH_POD", "WORKBENCH_RUN", "WORKBENCH_RANK_DIR")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment."""

    pid: int
    """Its number."""
    parent: int
    """Its parent's number."""
    session: int
    """Its session: the pid of whoever called setsid."""
    start: int
    """When it started, in clock ticks since boot; with the pid, its name for ever."""
    zombie: bool
    """Whether it has ended and only waits to be reaped."""

    @property
    def key(self) -> tuple[int, int]:
        """Return what tells it from every other process since boot."""
        return (self.pid, self.start)


def look_up(pid: int) -> Process | None:
    """Return the process that has this pid now, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may hold anything, parentheses too: what counts follows the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] in (b"Z", b"X"))


def process_table() -> dict[int, Process]:
    """Return all processes by pid; about 15 µs each."""
    found = (look_up(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 (names, not paths)
    return {process.pid: process for process in found if process is not None}


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` that are in the table and of all that descend from them."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in table]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def ancestors(table: Mapping[int, Process], pid: int) -> set[int]:
    """Return the pids above this one, itself among them."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found


def marks(pid: int) -> dict[str, str]:
    """Read our variables from the environment that a process was executed with; empty where we may not look."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in raw.split(b"\0") if item.startswith(b"WORKBENCH_"))
    return {name: value for name, _, value in pairs if name in _MARKS}


def memory(pid: int) -> tuple[int, int]:
    """Return a process's resident memory now and at its highest, in bytes; zeros once it has gone."""
    now = peak = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        now = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
        status = Path(f"/proc/{pid}/status").read_bytes()
        at = status.find(b"VmHWM:")
        peak = int(status[at:].split(None, 2)[1]) * 1024 if at >= 0 else now
    return now, max(now, peak)


def send(process: Process, signum: int) -> bool:
    """Signal this process and no other, even if its pid was given away in the meantime."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel or sandbox without pidfd: the gap between look and kill stays
        handle = -1
    try:
        now = look_up(process.pid)
        if now is None or now.start != process.start:
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, signum)
        else:
            os.kill(process.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


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
    """Put /dev/null on descriptor 0 and a rank's logs on 1 and 2, to be appended to."""
    _put(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        _put(os.open(folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), number)


def _put(opened: int, number: int) -> None:
    os.dup2(opened, number)
    os.close(opened)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
