"""What takes longer than an answer may: work of a fork of the agent, which says what came of it in one line of JSON."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from typing import BinaryIO

from workbench.base.errors import DiskFull
from workbench.base.files.disk import is_full
from workbench.base.lines import from_line, to_line
from workbench.base.process import die_with_parent

Answer = dict[str, object]


class Tasks:
    """The forks of one agent that work, and those that have ended and were not asked for yet."""

    def __init__(self) -> None:
        self._working: dict[int, tuple[BinaryIO, bytearray]] = {}

    @property
    def pids(self) -> Collection[int]:
        """Those whose answer has not been taken."""
        return self._working.keys()

    def begin(self, work: Callable[[], Answer]) -> int:
        """Fork, and return the pid, by which `take` is asked."""
        agent, (read, write) = os.getpid(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                be_child(agent)
                with open(write, "wb") as out:  # noqa: PTH123 (a descriptor)
                    out.write(_answer_of(work))
            finally:
                os._exit(0)
        os.close(write)
        os.set_blocking(read, False)
        self._working[pid] = open(read, "rb", buffering=0), bytearray()  # noqa: SIM115, PTH123
        return pid

    def take(self, task: int) -> Answer | None:
        """Return what came of a task, once; None while it works."""
        if task not in self._working:
            raise ValueError(f"there is no task {task}")
        pipe, answer = self._working[task]
        while (data := pipe.read(1 << 20)) is not None:
            answer += data
            if not data:
                pipe.close()
                del self._working[task]
                return from_line(answer) if answer else {"error": "it was killed"}
        return None


def be_child(agent: int) -> None:
    """Have a fork of the agent end with it, and take signals as any program does."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent(agent)


def _answer_of(work: Callable[[], Answer]) -> bytes:
    try:
        return to_line(work())
    except Exception as error:  # process boundary: whoever asked is told
        with contextlib.suppress(OSError):
            os.write(2, f"task: {error!r}\n".encode())
        full = isinstance(error, DiskFull) or (isinstance(error, OSError) and is_full(error))
        return to_line({"error": str(error) or type(error).__name__, "full": full})
