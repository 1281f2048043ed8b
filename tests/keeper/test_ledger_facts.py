"""What a ledger knows of ranks, processes and silence, and its remark for the user."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.sentences import says
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Pod
from workbench.rundir.events import Event
from workbench.rundir.outcome import RankStatus

A, B = Pod(name="pod-0", address="127.0.0.2"), Pod(name="pod-1", address="127.0.0.3")


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def seen(hand: Hand) -> RunLedger:
    return RunLedger(pods=["pod-0", "pod-1"], world_size=2, clock=hand)


def report(pod: Pod, phase: str = "running", *, live: int = 0, **more: Any) -> PodReport:
    facts = {"drained": True, **more}
    status = {name: facts.pop(name) for name in ("done", "ended_s") if name in facts}
    rank = RankStatus(rank=int(pod.name[-1]), pod=pod, phase=phase, **status)
    return PodReport(pod=pod, ranks=[rank], live_processes=live, **facts)


def lost(pod: Pod) -> PodReport:
    return PodReport(pod=pod, answered=False, lost=f"no sign from {pod.name}")


# The end of a run.


def test_a_run_without_a_report_of_each_rank_is_not_over(seen: RunLedger) -> None:
    seen.record(report(A, "exited"))
    seen.record(PodReport(pod=B, drained=True))
    assert (seen.gone, seen.over, seen.all_exited, seen.all_done) == (True, False, False, False)
    seen.record(report(B, "exited"))
    assert (seen.over, seen.all_exited, seen.all_done) == (True, True, False)


def test_a_run_is_over_without_the_ranks_of_a_lost_pod(seen: RunLedger) -> None:
    seen.record(report(A, "exited"))
    seen.record(lost(B))
    assert (seen.over, seen.all_exited) == (True, False)


def test_ranks_that_run_keep_a_run_from_its_end(seen: RunLedger) -> None:
    """An agent may count no process while a rank ends."""
    seen.record(report(A, "exited"))
    seen.record(report(B, "running"))
    assert (seen.gone, seen.over, seen.all_exited) == (False, False, False)


def test_ranks_that_wait_are_no_processes_and_no_end(seen: RunLedger) -> None:
    for pod in (A, B):
        seen.record(report(pod, "waiting"))
    assert (seen.gone, seen.over, seen.started) == (True, False, False)


def test_output_that_is_not_read_keeps_a_run_from_its_end(seen: RunLedger) -> None:
    seen.record(report(A, "exited"))
    seen.record(report(B, "exited", drained=False))
    assert (seen.gone, seen.over) == (False, False)


def test_the_end_on_some_pods_does_not_depend_on_the_others(seen: RunLedger) -> None:
    seen.record(report(A, "exited"))
    seen.record(report(B, "running", live=2))
    assert seen.gone_from(["pod-0"])
    assert not seen.gone_from(["pod-1"])
    assert not seen.gone_from(["pod-0", "pod-1"])


def test_a_rank_of_a_lost_pod_that_ran_does_not_count_as_running(seen: RunLedger) -> None:
    seen.record(report(B, "running"))
    seen.record(lost(B))
    seen.record(report(A, "exited"))
    assert seen.over


# Processes.


def test_processes_of_all_pods_are_counted(seen: RunLedger) -> None:
    seen.record(report(A, live=2))
    seen.record(report(B, live=3))
    assert seen.live_processes == 5


def test_processes_of_a_pod_that_is_silent_for_some_seconds_are_unknown(
    seen: RunLedger, hand: Hand
) -> None:
    for pod in (A, B):
        seen.record(report(pod, live=1))
    hand.now += 4.0
    assert seen.live_processes == 2
    hand.now += 2.0
    seen.record(report(A, live=1))
    assert seen.live_processes is None


def test_no_process_is_left_however_long_ago_a_run_was_over(seen: RunLedger, hand: Hand) -> None:
    for pod in (A, B):
        seen.record(report(pod, "exited"))
    hand.now += 600.0
    assert seen.live_processes == 0


# Silence.


def test_silence_counts_from_the_beginning_of_the_watch(seen: RunLedger, hand: Hand) -> None:
    hand.now += 50.0
    seen.begin()
    hand.now += 3.0
    assert seen.silent(2.0) == {"pod-0": 3.0, "pod-1": 3.0}
    assert seen.silent(3.0) == {"pod-0": 3.0, "pod-1": 3.0}
    assert seen.silent(4.0) == {}


def test_a_lost_pod_neither_answers_nor_is_silent(seen: RunLedger, hand: Hand) -> None:
    seen.record(lost(B))
    hand.now += 3.0
    assert (seen.silent(1.0), seen.answering()) == ({"pod-0": 3.0}, ["pod-0"])
    assert seen.answering(1.0) == []


def test_a_pod_that_was_heard_answers(seen: RunLedger, hand: Hand) -> None:
    hand.now += 3.0
    seen.record(report(B))
    assert seen.answering(1.0) == ["pod-1"]


def test_any_pod_counts_as_heard_even_if_it_was_lost_since(seen: RunLedger, hand: Hand) -> None:
    assert seen.heard_within(1.0)
    hand.now += 3.0
    assert not seen.heard_within(1.0)
    seen.record(report(B))
    seen.record(lost(B))
    hand.now += 1.0
    assert seen.heard_within(2.0)
    assert not seen.heard_within(1.0)


# Steps.


def event(kind: str, **data: object) -> Event:
    return Event(time_s=1.0, rank=0, kind=kind, data=data)


def test_a_run_is_in_its_steps_unless_its_first_rank_does_something_else(
    seen: RunLedger,
) -> None:
    assert not seen.in_steps
    seen.totals.take(event("first_step"))
    assert seen.in_steps
    seen.totals.take(Event(time_s=1.0, rank=1, kind="phase", data={"name": "evaluating"}))
    assert seen.in_steps
    seen.totals.take(event("phase", name="saving"))
    assert not seen.in_steps
    seen.totals.take(event("phase", name="training"))
    assert seen.in_steps


# Remarks.


def remark(seen: RunLedger, **given: Any) -> str:
    return seen.remark(given.pop("stall", ""), **{"stopping": "", **given})


def test_a_run_without_a_problem_has_no_remark(seen: RunLedger) -> None:
    for pod in (A, B):
        seen.record(report(pod))
    assert remark(seen) == ""
    assert remark(seen, place="no quota") == ""


def test_a_sleep_goes_before_all_else(seen: RunLedger, hand: Hand) -> None:
    hand.now += 20.0
    assert remark(seen, slept="this machine slept for 9 s").startswith("this machine slept for 9 s")


def test_silent_pods_are_named_with_their_seconds(seen: RunLedger, hand: Hand) -> None:
    seen.record(report(A))
    hand.now += 15.0
    seen.record(report(A))
    said = remark(seen, stall="no step")
    assert says(said, "no sign from {}; training continues there until the lease ends", "pod-1", 15)
    assert "pod-0" not in said
    assert says(
        remark(seen, place="no quota"),
        "no sign from {}; training continues there until the lease ends",
        "no quota",
        "pod-1",
    )


def test_a_single_silent_pod_is_no_lost_network(hand: Hand) -> None:
    seen = RunLedger(pods=["pod-0"], world_size=1, clock=hand)
    hand.now += 20.0
    assert says(
        remark(seen), "no sign from {}; training continues there until the lease ends", "pod-0", 20
    )
    assert not says(remark(seen), "this machine was cut off from the network, or asleep")


def test_two_silent_pods_are_a_lost_network(seen: RunLedger, hand: Hand) -> None:
    hand.now += 20.0
    assert says(remark(seen), "this machine was cut off from the network, or asleep")
    said = remark(seen, place="no quota")
    assert "no quota" in said
    assert not says(said, "this machine was cut off from the network, or asleep")


def ended_alone(seen: RunLedger, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have rank 1 end while rank 0 runs on."""
    monkeypatch.setattr("workbench.keeper.watch.ledger.now_s", lambda: 5000.0)
    seen.record(report(A))
    seen.record(report(B, "exited", done=True, ended_s=5000.0 - seconds))


def test_ranks_that_ended_alone_are_named_after_some_time(
    seen: RunLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_alone(seen, monkeypatch, 29.0)
    assert remark(seen) == ""
    ended_alone(seen, monkeypatch, 30.0)
    assert seen.ended_alone == {1: 30.0}
    assert says(remark(seen), "ranks {} have ended; the others run on", "[1]")
    assert remark(seen, stall="no step for 60 s").endswith("no step for 60 s")
    assert remark(seen, stopping="stopping") == remark(seen)


def test_ranks_that_failed_or_ended_last_did_not_end_alone(
    seen: RunLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_alone(seen, monkeypatch, 60.0)
    seen.record(report(B, "exited", ended_s=4000.0))
    assert seen.ended_alone == {}
    seen.record(report(B, "exited", done=True))
    assert seen.ended_alone == {}, "its end has no time"
    ended_alone(seen, monkeypatch, 60.0)
    seen.record(report(A, "exited"))
    assert seen.ended_alone == {}


def test_a_standstill_goes_before_a_stop_and_a_stop_before_warnings(seen: RunLedger) -> None:
    for pod in (A, B):
        seen.record(report(pod, full=f"no space on {pod.name}"))
    assert remark(seen, stall="no step", stopping="stopping") == "no step"
    assert remark(seen, stopping="stopping") == "stopping"
    assert "pod-0" in remark(seen) and "pod-1" not in remark(seen), "the first warning"
    seen.record(report(B, cut="the disk here is full"))
    assert says(remark(seen), "logs here are incomplete", "the disk here is full")
    seen.record(report(B))
    assert not says(remark(seen), "logs here are incomplete"), "the logs are complete again"


def test_full_disks_and_removed_files_are_warnings_for_good(seen: RunLedger) -> None:
    seen.record(report(A, full="no space on pod-0", removed="logs were removed"))
    seen.record(report(A))
    first, second = seen.warnings
    assert "logs were removed" in first and "pod-0" in first
    assert "no space on pod-0" in second


def test_notes_of_the_ranks_are_warnings(seen: RunLedger) -> None:
    seen.totals.take(event("note", message="the data has one row twice"))
    assert ["twice" in each for each in seen.warnings] == [True]
