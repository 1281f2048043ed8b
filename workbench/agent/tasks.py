"""Run slow work in forks of the agent. A fork returns its result as a line of JSON."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from typing import BinaryIO

from workbench.base.errors import DiskFull
from workbench.base.files.disk import is_full
from workbench.base.messages.lines import from_line, send_if_open, to_line
from workbench.base.process import die_with_parent

Answer = dict[str, object]


class Tasks:
    """Forks of an agent: working forks, and forks with results not taken yet."""

    def __init__(self) -> None:
        self._working: dict[int, tuple[BinaryIO, bytearray]] = {}

    @property
    def pids(self) -> Collection[int]:
        """Pids of the forks whose results have not been taken."""
        return self._working.keys()

    def begin(self, work: Callable[[], Answer]) -> int:
        """Start work in a fork and return the pid, the argument of `take`."""
        agent = os.getpid()
        (read, write) = os.pipe()
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

    def result(self, task: int) -> Answer | None:
        """Return the result of a task once; None until the task ends."""
        if task not in self._working:
            raise ValueError(f"there is no task {task}")
        pipe, answer = self._working[task]
        while (data := pipe.read(1 << 20)) is not None:
            answer += data
            if not data:
                pipe.close()
                del self._working[task]
                if not answer:
                    return {"error": "it was killed"}
                return from_line(answer)
        return None


def be_child(agent: int) -> None:
    """Make a fork end with the agent and handle signals as a usual program."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent(agent)


def _answer_of(work: Callable[[], Answer]) -> bytes:
    try:
        return to_line(work())
    except Exception as error:  # process boundary: the caller receives the error
        send_if_open(2, f"task: {error!r}\n".encode())
        message = str(error) or type(error).__name__
        full = isinstance(error, DiskFull) or (isinstance(error, OSError) and is_full(error))
        return to_line({"error": message, "full": full})
