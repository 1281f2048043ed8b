"""Find and end processes by pid and start time, by descent, or by a mark in their environment.

Reads `/proc`. Never looks at names or command lines: a process that merely looks like ours is left alone. On a
system without `/proc` everything here finds nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "adopt_orphans", "descendants", "die_with_parent", "end_all", "find", "with_mark"]

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Process:
    """One process; a later one with the same pid has another start time."""

    pid: int
    """Process id."""
    start_time: int
    """When it started, in clock ticks since boot."""

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat[2] == self.start_time and stat[0] not in "ZX"

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal, and nothing to another process that got its pid; tell whether it was there."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True


def find(pid: int) -> Process | None:
    """Return the live process with this pid, or None."""
    stat = _stat(pid)
    return None if stat is None or stat[0] in "ZX" else Process(pid=pid, start_time=stat[2])


def descendants(root: int) -> list[Process]:
    """List the live children of a process, their children, and so on; not the process itself."""
    children: dict[int, list[int]] = {}
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
    for pid, (_state, parent, _start) in stats.items():
        children.setdefault(parent, []).append(pid)
    found, queue = [], list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        queue.extend(children.get(pid, ()))
        if stats[pid][0] not in "ZX":
            found.append(Process(pid=pid, start_time=stats[pid][2]))
    return found


def with_mark(name: str, values: Iterable[str]) -> list[Process]:
    """List the live processes started with `name` as one of the values in their environment, this one left out."""
    marks = {os.fsencode(f"{name}={value}") for value in values}
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            process = find(pid)
            environment = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if process and pid != os.getpid() and not marks.isdisjoint(environment):
                found.append(process)
    return found


def end_all(listing: Callable[[], Iterable[Process]], *, grace_s: float, kill_s: float = 1.0) -> list[Process]:
    """End every listed process: TERM, then KILL to those left after the grace; list again until none is left."""
    told: set[Process] = set()
    start_s = time.monotonic()
    while left := list(listing()):
        waited_s = time.monotonic() - start_s
        if waited_s > grace_s + kill_s:
            return left
        for process in left:
            if waited_s >= grace_s:
                process.send(signal.SIGKILL)
            elif process not in told:
                process.send(signal.SIGTERM)
                told.add(process)
        time.sleep(0.02)
    return []


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (Linux only)."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` after which the kernel kills the child when the calling thread ends (Linux only)."""
    prctl = _prctl()
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl() -> Callable[[int, int], None]:
    """Give Linux's prctl, ready to be called between fork and exec; elsewhere a function that does nothing."""
    if sys.platform != "linux":
        return lambda _option, _value: None
    library = ctypes.CDLL(None)
    return lambda option, value: library.prctl(option, int(value), 0, 0, 0)


def _pids() -> Iterator[int]:
    """Walk over all process ids."""
    with contextlib.suppress(OSError):
        yield from (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Read state, parent and start time of a process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    words = text[text.rindex(b")") + 2 :].split()  # the name before it may hold blanks and brackets
    return words[0].decode(), int(words[1]), int(words[19])
