"""Results of an agent's forks, seen from the agent. No process: the tests write into the pipes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator

import pytest

from workbench.agent import tasks
from workbench.agent.tasks import Answer, Tasks
from workbench.base.errors import DiskFull
from workbench.base.messages.lines import from_line

PID = 4321


class Fork:
    """A fork that the agent believes to have made, and the writing end of its pipe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing = -1
        pipe = os.pipe

        def make_pipe() -> tuple[int, int]:
            read, write = pipe()
            self.writing = os.dup(write)
            return read, write

        monkeypatch.setattr(os, "pipe", make_pipe)
        monkeypatch.setattr(os, "fork", lambda: PID)

    def write(self, data: bytes) -> None:
        os.write(self.writing, data)

    def end(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
        self.writing = -1


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fork]:
    made = Fork(monkeypatch)
    yield made
    made.end()


def nothing() -> Answer:
    return {}


def test_a_result_in_pieces_is_taken_once_at_its_end(fork: Fork) -> None:
    working = Tasks()
    task = working.begin(nothing)
    assert (task, [*working.pids]) == (PID, [PID])
    assert working.result(task) is None
    fork.write(b'{"state": ')
    assert working.result(task) is None
    fork.write(b'"made"}\n')
    assert working.result(task) is None, "the fork still works"
    fork.end()
    assert working.result(task) == {"state": "made"}
    assert not working.pids
    with pytest.raises(ValueError, match=str(PID)):
        working.result(task)


def test_a_fork_that_ends_without_an_answer_was_killed(fork: Fork) -> None:
    working = Tasks()
    task = working.begin(nothing)
    fork.end()
    assert "error" in (working.result(task) or {})
    assert not working.pids


def answer_of(error: Exception) -> dict[str, object]:
    def fail() -> Answer:
        raise error

    return from_line(tasks._answer_of(fail))


@pytest.mark.parametrize(
    ("error", "message", "full"),
    [
        (ValueError("no such run"), "no such run", False),
        (RuntimeError(), "RuntimeError", False),
        (DiskFull("the disk is full"), "the disk is full", True),
        (OSError(errno.ENOSPC, "no space"), "[Errno 28] no space", True),
        (OSError(errno.EACCES, "not yours"), "[Errno 13] not yours", False),
    ],
)
def test_an_error_of_the_work_is_its_answer(error: Exception, message: str, full: bool) -> None:
    assert answer_of(error) == {"error": message, "full": full}


def test_an_error_of_the_work_stands_in_the_agents_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer_of(ValueError("no such run"))
    assert "no such run" in capfd.readouterr().err


def test_a_result_is_a_line_of_json() -> None:
    line = tasks._answer_of(lambda: {"out": [["a", 1]]})
    assert line.endswith(b"\n") and json.loads(line) == {"out": [["a", 1]]}
