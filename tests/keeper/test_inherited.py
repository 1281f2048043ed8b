"""What is found of a dead keeper's ranks, and how a lost attempt goes on: no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import RUN, SimLink, Simulation
from tests.keeper.acts import script
from tests.support.sentences import says, sentence
from workbench.base.errors import RemoteError, RunError
from workbench.base.files import write_json
from workbench.jobs.script import Script
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.decisions import RunDecisions
from workbench.keeper.link.agent import PodGone
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.run import restart as module
from workbench.keeper.run.policy import Loss
from workbench.keeper.run.restart import (
    InheritedRanks,
    end_earlier_ranks,
    inherited_ranks,
    replace_lost_pods,
    restart_on,
)
from workbench.pods.pod import Phase
from workbench.rundir.events import Event
from workbench.rundir.totals import RunTotals

Answer = Mapping[str, object]
RUNNING: Answer = {"phases": ["running"], "inherited": False, "attempt": 1, "restart": 0}
WAITING: Answer = {**RUNNING, "phases": ["waiting"]}
NONE: Answer = {**RUNNING, "phases": [], "attempt": 0}


class Link(SimLink):
    """A line to an agent with a given answer to `rejoin`."""

    def __init__(self, of: Any) -> None:
        super().__init__(of)
        self.answer: Answer = RUNNING
        self.fails = 0
        """Number of requests that fail first."""
        self.alive: list[Answer | None] = [{"live_processes": 0}]
        """Answers to `poll`; None: no answer. The last is that of all later requests."""
        self.commands: list[list[str]] = []
        self.files: list[str] = []
        self.fields: Mapping[str, Any] = {}
        """Those of the last request."""

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self.fields = fields
        if op == "rejoin":
            if self.fails:
                self.fails -= 1
                raise RemoteError("no answer", host=self.pod.address)
            return dict(self.answer)
        if op == "poll":
            answer = self.alive[0]
            if len(self.alive) > 1:
                self.alive.pop(0)
            if answer is None:
                raise RemoteError("no answer", host=self.pod.address)
            return dict(answer)
        return {}

    def ensure(self) -> None:
        pass

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        self.commands.append(list(argv))
        return ""

    def put_file(self, source: Path, target: str) -> None:  # type: ignore[override]
        self.files.append(target)


class Hand:
    """A clock that each pause moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(module, "time", hand)
    return hand


class Kept:
    """A run with two pods, and a log of decisions that says what a test asks for."""

    def __init__(self, folder: Path, job: Script) -> None:
        self.sim = Simulation(folder, job)
        self.links = [Link(pod) for pod in self.sim.pods]
        self.decided: RunDecisions | None = None
        log: Any = SimpleNamespace(of=lambda _run: self.decided)
        self.context: RunContext = replace(self.sim.context().on(self.links), log=log)

    def answers(self, *answers: Answer) -> None:
        for link, answer in zip(self.links, answers, strict=True):
            link.answer = answer

    def found(self) -> InheritedRanks:
        ranks = inherited_ranks(self.context)
        assert ranks is not None
        return ranks

    def gone(self) -> PodGone:
        with pytest.raises(PodGone) as gone:
            inherited_ranks(self.context)
        return gone.value

    def asked(self, op: str) -> list[str]:
        return sorted(pod for pod, each in self.sim.asked if each == op)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path, script(restarts=2))


def launcher_lives(monkeypatch: pytest.MonkeyPatch) -> object:
    launcher = object()
    monkeypatch.setattr(
        "workbench.keeper.run.restart.LauncherProcess.left_by_another",
        staticmethod(lambda *_args: launcher),
    )
    return launcher


def test_ranks_that_run_are_found_with_their_attempt(kept: Kept) -> None:
    kept.answers(
        {**RUNNING, "attempt": 3, "restart": 2, "inherited": True}, {**RUNNING, "attempt": 3}
    )
    found = kept.found()
    assert (found.attempt, found.restart) == (3, 2)
    assert (found.launcher, found.unwatched) == (None, True)
    assert kept.asked("start") == []


def test_an_agent_gets_the_request_of_a_run_whose_port_is_unknown(kept: Kept) -> None:
    kept.found()
    for link in kept.links:
        request = link.fields["request"]
        assert (request["master_addr"], request["master_port"]) == ("10.0.0.0", 0)


def test_ranks_that_wait_beside_ranks_that_run_are_started(kept: Kept) -> None:
    kept.answers(RUNNING, WAITING)
    assert kept.found().launcher is None
    assert kept.asked("start") == ["pod-0", "pod-1"]


def test_ranks_that_all_wait_are_prepared_anew(kept: Kept) -> None:
    kept.answers(WAITING, WAITING)
    assert inherited_ranks(kept.context) is None
    assert kept.asked("start") == []
    kept.answers(WAITING, NONE)
    assert inherited_ranks(kept.context) is None


def test_pods_without_any_rank_are_prepared(kept: Kept) -> None:
    kept.answers(NONE, NONE)
    assert inherited_ranks(kept.context) is None


def test_a_log_that_knows_no_start_does_not_hinder_one(kept: Kept) -> None:
    kept.decided = RunDecisions(run=RUN, attempt=1)
    kept.answers(NONE, NONE)
    assert inherited_ranks(kept.context) is None


def test_a_start_that_the_log_knows_needs_records_on_all_pods(kept: Kept) -> None:
    kept.decided = RunDecisions(run=RUN, attempt=1, started=True)
    kept.answers(WAITING, NONE)
    assert kept.gone().host == "10.0.0.1"


def test_ranks_that_wait_for_a_launcher_that_lives_are_its_own(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_lives(monkeypatch)
    kept.answers(WAITING, WAITING)
    found = kept.found()
    assert (found.launcher, kept.asked("start")) == (launcher, [])
    kept.answers(RUNNING, WAITING)
    assert kept.found().launcher is launcher
    assert kept.asked("start") == []


def test_a_launcher_without_records_on_a_pod_blames_the_pod(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher_lives(monkeypatch)
    kept.answers(WAITING, NONE)
    assert kept.gone().host == "10.0.0.1"


@pytest.mark.parametrize(
    ("launcher", "ended"), [("ssh", True), ("openmpi", False), ("pdsh", False)]
)
def test_ranks_that_wait_without_a_launcher_fail_the_run(
    launcher: str, ended: bool, tmp_path: Path
) -> None:
    """The launcher has died, or some ranks ended with their agent."""
    kept = Kept(tmp_path, script(launcher=launcher))
    kept.answers({**RUNNING, "inherited": ended}, WAITING)
    with pytest.raises(RunError):
        inherited_ranks(kept.context)
    assert kept.asked("start") == []


def test_a_run_that_cannot_be_started_here_says_why(kept: Kept) -> None:
    kept.context = replace(kept.context, unstartable="HF_TOKEN is not set")
    kept.answers(WAITING, WAITING)
    with pytest.raises(RunError, match="HF_TOKEN is not set"):
        inherited_ranks(kept.context)
    kept.answers(RUNNING, RUNNING)
    assert kept.found().attempt == 1, "ranks that run need no start"


@pytest.mark.parametrize("by", ["manifest", "log"])
def test_a_run_whose_results_are_here_is_not_begun_again(by: str, kept: Kept) -> None:
    if by == "manifest":
        write_json(kept.context.paths.manifest, {})
    else:
        kept.decided = RunDecisions(run=RUN, attempt=1, brought=True)
    kept.answers(NONE, NONE)
    with pytest.raises(RunError, match=sentence("the pods have no record of the run any more")):
        inherited_ranks(kept.context)
    kept.answers(RUNNING, RUNNING)
    assert kept.found().attempt == 1, "its pods have not been cleared"


def test_a_pod_with_ranks_of_an_earlier_attempt_is_blamed(kept: Kept) -> None:
    kept.answers(RUNNING, {**RUNNING, "attempt": 2})
    gone = kept.gone()
    assert gone.host == "10.0.0.0"
    assert "attempt 2" in str(gone) and "pod-1" in str(gone)
    kept.answers({**RUNNING, "attempt": 0}, {**RUNNING, "attempt": 2})
    assert kept.found().attempt == 2, "the pod lost the number of its attempt"


def test_a_pod_with_ranks_of_an_attempt_before_that_of_the_log_is_blamed(kept: Kept) -> None:
    kept.context = replace(kept.context, attempt=2)
    kept.answers({**RUNNING, "attempt": 2}, RUNNING)
    assert kept.gone().host == "10.0.0.1"


@pytest.mark.parametrize(
    "odd",
    [
        {"phases": "running"},
        {"phases": ["running", 3]},
        {"phases": None},
        {"inherited": 1},
        {"attempt": -1},
        {"attempt": "2"},
        {"attempt": 1002},
        {"restart": -1},
        {"restart": 3},
    ],
)
def test_an_answer_of_another_form_blames_its_pod(odd: Answer, kept: Kept) -> None:
    kept.answers(RUNNING, {**RUNNING, **odd})
    assert kept.gone().host == "10.0.0.1"


def test_a_dead_keeper_may_have_begun_a_thousand_attempts(kept: Kept) -> None:
    """The disk was full, so its log has none of them."""
    kept.answers(*[{**RUNNING, "attempt": 1001, "restart": 2}] * 2)
    assert (kept.found().attempt, kept.found().restart) == (1001, 2)


# Pods that do not answer.


def test_a_pod_that_answers_within_its_lease_is_waited_for(kept: Kept) -> None:
    kept.links[1].fails = 20
    assert kept.found().attempt == 1
    assert kept.asked("rejoin").count("pod-1") == 21


def test_a_pod_that_is_silent_for_a_lease_is_lost(kept: Kept, hand: Hand) -> None:
    kept.links[1].fails = 10_000
    began = hand.now
    gone = kept.gone()
    assert (gone.host, "30 s" in str(gone)) == ("10.0.0.1", True)
    assert 30.0 <= hand.now - began < 32.0


def test_a_pod_that_its_platform_has_ended_is_not_waited_for(kept: Kept, hand: Hand) -> None:
    kept.links[1].fails = 10_000
    pod = kept.sim.pods[1]
    pod.pod = replace(pod.pod, phase=Phase.FAILED, message="evicted")
    began = hand.now
    assert "evicted" in str(kept.gone())
    assert hand.now == began


def test_another_pod_that_has_ended_is_not_the_silent_one(kept: Kept, hand: Hand) -> None:
    kept.links[1].fails = 3
    pod = kept.sim.pods[0]
    pod.pod = replace(pod.pod, phase=Phase.FAILED, message="evicted")
    assert kept.found().attempt == 1


def test_a_platform_that_does_not_answer_blames_no_pod(kept: Kept) -> None:
    def refuse() -> Sequence[Any]:
        raise RunError("the API server does not answer")

    kept.context = replace(kept.context, refresh=refuse)
    kept.links[1].fails = 3
    assert kept.found().attempt == 1


# The end of earlier ranks.


def test_earlier_ranks_are_asked_to_end_and_waited_for(kept: Kept, hand: Hand) -> None:
    kept.links[0].alive = [{"live_processes": 2}, {"live_processes": 2}, {"live_processes": 0}]
    kept.links[1].alive = [None]
    began = hand.now
    end_earlier_ranks(kept.context)
    assert kept.asked("stop") == ["pod-0", "pod-1"]
    assert 0.0 < hand.now - began < 1.0
    assert kept.asked("poll").count("pod-0") == 3
    assert kept.links[0].fields["max_bytes"] == 0, "output is read later"


def test_earlier_ranks_that_do_not_end_are_left_after_some_seconds(kept: Kept, hand: Hand) -> None:
    kept.links[0].alive = [{"live_processes": 1}]
    began = hand.now
    end_earlier_ranks(kept.context)
    assert 15.0 <= hand.now - began < 16.0


# Restarts.


def test_pods_are_replaced_and_those_that_stay_lost_are_left_out(kept: Kept) -> None:
    asked: list[Sequence[str]] = []

    def restoring(left: Mapping[str, str]) -> Callable[[Any], Mapping[str, str]]:
        def restore(lost: Any) -> Mapping[str, str]:
            asked.append(sorted(lost))
            return left

        return restore

    requests = StopRequests()
    context = replace(kept.context, restore=restoring({}))
    assert replace_lost_pods(context, ["pod-1"], requests) == kept.links
    context = replace(kept.context, restore=restoring({"pod-1": "no host"}))
    assert replace_lost_pods(context, ["pod-1"], requests) == kept.links[:1]
    context = replace(kept.context, restore=restoring({"pod-0": "no host", "pod-1": "no quota"}))
    with pytest.raises(RunError, match="no host; no quota"):
        replace_lost_pods(context, ["pod-0", "pod-1"], requests)
    assert asked == [["pod-1"], ["pod-1"], ["pod-0", "pod-1"]]
    # The platform has ended the other pod after the watch of the run.
    ended = [replace(link.pod, phase=Phase.FAILED) for link in kept.links[:1]]
    context = replace(kept.context, restore=restoring({}), refresh=lambda: ended)
    assert replace_lost_pods(context, ["pod-1"], requests) == kept.links
    assert asked.pop() == ["pod-0", "pod-1"]
    context = replace(kept.context, restore=restoring({}))
    # A killed rank costs no pod.
    assert replace_lost_pods(context, [], requests) == kept.links
    requests.cancel.set()
    assert replace_lost_pods(context, [], requests) is None
    assert replace_lost_pods(context, ["pod-1"], requests) is None


class Stepping(Script):
    """A script that continues from its own checkpoints, as a trainer does."""

    def resumed(self, root: Path, **facts: Any) -> tuple[int | None, int | None]:
        ASKED.append(facts)
        return STEP[0], None


ASKED: list[Mapping[str, Any]] = []
STEP: list[int | None] = [None]
LOSS = Loss(what="pod-1 was lost", why="evicted", pods=["pod-1"], lost_s=5.12345)


def restarted(kept: Kept, step: int | None, saved: int = 0) -> tuple[RunContext, Event]:
    """Prepare a restart from a step on both pods."""
    ASKED.clear()
    STEP[0] = step
    totals = RunTotals()
    if saved:
        totals.take(Event(time_s=1.0, rank=0, kind="checkpoint", data={"step": saved}))
    returned = PulledCheckpoints(notes=["a part is out of reach"])
    return restart_on(kept.context, kept.links, totals, LOSS, returned)


@pytest.fixture
def stepping(tmp_path: Path) -> Kept:
    kept = Kept(tmp_path, Stepping.from_dict({"path": "/home/me/train.py", "restarts": 2}))
    kept.context = replace(kept.context, attempt=3, restart=1, inherited=True)
    return kept


def test_a_restart_keeps_its_numbers_and_is_started_by_this_keeper(stepping: Kept) -> None:
    context, event = restarted(stepping, None)
    assert (context.attempt, context.restart, context.inherited) == (3, 1, False)
    assert event.kind == "restarted" and event.rank is None
    assert event.data == {
        "what": "pod-1 was lost",
        "why": "evicted",
        "lost_step": event.data["lost_step"],
        "step": None,
        "pods": 2,
        "ranks": 2,
        "batch": None,
        "lost_s": 5.123,
    }
    assert (ASKED[0]["before"], ASKED[0]["ranks"]) == (2, 2)


def test_the_number_of_ranks_before_is_that_of_the_inputs(stepping: Kept) -> None:
    """A dead keeper had rewritten the inputs for fewer ranks."""
    write_json(stepping.context.paths.job, {"ranks": 1})
    restarted(stepping, None)
    assert ASKED[0]["before"] == 1


def test_a_restart_from_the_beginning_says_why_if_a_checkpoint_was_saved(stepping: Kept) -> None:
    _, event = restarted(stepping, 0, saved=10)
    fresh = str(event.data["fresh"])
    assert says(fresh, "was not whole here yet when the loss was noticed", 10)
    assert fresh.endswith("a part is out of reach")
    assert "fresh" not in restarted(stepping, 0)[1].data
    assert "fresh" not in restarted(stepping, 10, saved=10)[1].data
    assert "fresh" not in restarted(stepping, None, saved=10)[1].data


@pytest.mark.parametrize(
    ("step", "moved", "removed"),
    [
        (4, ["step-4", "resume"], {"checkpoints", "stop"}),
        (0, [], {"checkpoints", "stop", "resume"}),
    ],
)
def test_a_job_that_resumes_keeps_the_parts_to_resume_from(
    stepping: Kept, step: int, moved: list[str], removed: set[str]
) -> None:
    restarted(stepping, step)
    *moves, removal = stepping.links[0].commands
    assert [path.rpartition("/")[2] for move in moves for path in move[4:]] == moved
    assert removal[:3] == ["rm", "-rf", "--"]
    assert {path.rpartition("/")[2] for path in removal[3:]} == removed


def test_a_script_keeps_its_own_checkpoints(stepping: Kept) -> None:
    restarted(stepping, None)
    assert not any("-rf" in command for link in stepping.links for command in link.commands)


def test_no_log_goes_to_the_pods_of_the_next_attempt(stepping: Kept) -> None:
    stepping.context.paths.rank_log(0, 1, "stderr").write_text("a line\n")
    restarted(stepping, None)
    for link in stepping.links:
        assert not link.files and not link.commands


def test_a_run_that_cannot_start_here_is_not_restarted(stepping: Kept) -> None:
    stepping.context = replace(stepping.context, unstartable="HF_TOKEN is not set")
    with pytest.raises(RunError, match="HF_TOKEN"):
        restarted(stepping, None)
