"""The agent holds a keeper's poll until there is news of the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.agent.conftest import PATIENCE_S, PodAgent
from workbench.base.messages.rpc import Call, Late

HELD_S = 5.0
WAITS = """
import sys, time
from pathlib import Path
while not Path({path!r}).exists():
    time.sleep(0.02)
{then}
time.sleep(600)
"""
LOG = "attempt-0/rank-0.stdout.log"


class Held:
    """A running rank that does something once a file is there, and a poll of its keeper."""

    def __init__(self, agent: PodAgent, folder: Path) -> None:
        self.agent = agent
        self.folder = folder
        self.sign = folder / "go"

    def begin(self, then: str) -> None:
        self.agent.start("r", WAITS.format(path=str(self.sign), then=then))
        self.agent.until("r", lambda a: a["ranks"][0]["phase"] == "running")

    def ask(self, **more: object) -> Call:
        fields = {"offsets": self.agent.offsets["r"], "phases": {"0": "running"}}
        assert self.agent.keeper is not None
        return self.agent.keeper._client.send(
            {"op": "poll", "run": "r", "wait_s": HELD_S, **fields, **more}
        )

    def answer(self, call: Call, timeout_s: float = PATIENCE_S) -> dict:
        assert self.agent.keeper is not None
        return self.agent.keeper._client.result(call, timeout_s)


@pytest.fixture
def held(agent: PodAgent, tmp_path: Path) -> Held:
    agent.serve("--lease-s", "600")
    return Held(agent, tmp_path)


@pytest.mark.parametrize(
    ("then", "phase"),
    [
        ("print('news', flush=True)", "running"),
        ("sys.stderr.write('n'); sys.stderr.flush()", "running"),
        ("raise SystemExit(3)", "exited"),
    ],
)
def test_a_poll_is_answered_at_the_next_news(held: Held, then: str, phase: str) -> None:
    held.begin(then)
    polls = 0
    while True:
        call = held.ask()
        # A request behind the poll is answered first while the run is quiet.
        held.agent.ask("ping")
        held.sign.touch()
        answer = held.answer(call)
        polls += 1
        if answer["chunks"] or answer["ranks"][0]["phase"] != "running":
            break
    assert answer["ranks"][0]["phase"] == phase
    if phase == "exited":
        assert answer["ranks"][0]["exit_code"] == 3


def test_a_rank_that_is_stopped_by_a_signal_is_news_once(held: Held) -> None:
    held.begin("pass")
    (rank,) = held.agent.ask("poll", run="r", offsets=held.agent.offsets["r"])["ranks"]
    for number, halted in ((signal.SIGSTOP, True), (signal.SIGCONT, False)):
        call = held.ask(phases={"0": "running" if halted else "halted"})
        os.kill(rank["pid"], number)
        (rank,) = held.answer(call)["ranks"]
        assert rank["halted"] is halted
    call = held.ask()
    with pytest.raises(Late):
        held.answer(call, timeout_s=0.0)
    held.answer(call)


def test_a_quiet_run_holds_a_poll_and_the_agent_answers_others(held: Held) -> None:
    held.begin("pass")
    call = held.ask()
    for _ in range(3):
        assert held.agent.ask("ping")["pid"] == held.agent.pid
    with pytest.raises(Late):
        held.answer(call, timeout_s=0.0)
    answer = held.answer(call)
    assert answer["chunks"] == {}
    assert answer["ranks"][0]["phase"] == "running"


@pytest.mark.parametrize("more", [{"phases": {}}, {"phases": {"0": "waiting"}}, {"wait_s": 0}])
def test_a_reader_that_lacks_something_has_its_answer_at_once(
    held: Held, more: dict[str, object]
) -> None:
    held.begin("pass")
    call = held.ask(**more)
    second = held.ask(wait_s=0)
    held.answer(second)
    assert call.answer is not None, "the answers come in the order of the requests"
    held.answer(call)


def test_a_stop_answers_a_held_poll(held: Held) -> None:
    held.begin("pass")
    call = held.ask()
    held.agent.ask("stop", run="r", grace_s=0.1)
    phases = set()
    while "exited" not in phases:
        phases.add(held.answer(call)["ranks"][0]["phase"])
        call = held.ask()
