"""What the end of an attempt means for its run: no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sentences import says
from workbench.keeper.run import policy as module
from workbench.keeper.run.policy import (
    AttemptEnd,
    Loss,
    Outcome,
    blame,
    final_state,
    judge,
    loss_of,
    stopped_by_others,
)
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Pod
from workbench.rundir.outcome import RankError, RankStatus
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault

A, B = Pod(name="pod-0", address="10.0.0.0"), Pod(name="pod-1", address="10.0.0.1")
KILLED = RunFault(kind="signal", rank=1, pod="pod-1", message="killed by SIGKILL")
PORT = RunFault(kind="RuntimeError", message="port 29500", traceback="EADDRINUSE")


def rank(number: int, **state: Any) -> RankStatus:
    return RankStatus(rank=number, pod=(A, B)[number], phase="exited", **state)


def ledger(*ranks: RankStatus) -> RunLedger:
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2)
    for each in ranks:
        seen.record(PodReport(pod=each.pod, ranks=[each], drained=True))
    return seen


def test_a_loss_is_read_back_from_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Loss(what="pod-1 was lost", why="evicted", pods=["pod-1"], lost_s=5.5)
    assert Loss.read(loss.to_facts()) == loss
    monkeypatch.setattr(module, "now_s", lambda: 9.0)
    assert Loss.read({}) == Loss(what="", why="", pods=[], lost_s=9.0)


def test_a_loss_that_ends_a_run_blames_its_first_pod() -> None:
    loss = Loss(what="pods were lost", why="evicted", pods=["pod-1", "pod-2"], lost_s=5.5)
    assert (loss.fault.kind, loss.fault.pod, loss.fault.message) == ("pod", "pod-1", "evicted")
    bare = replace(loss, why="", pods=[]).fault
    assert (bare.pod, bare.message) == ("", "pods were lost")


@pytest.mark.parametrize(
    ("lost", "fault", "pods", "what"),
    [
        ([], RunFault(kind="pod", pod="pod-1", message="evicted"), ["pod-1"], "pod-1 was lost"),
        (["pod-0"], RunFault(kind="pod", pod="pod-1"), ["pod-0", "pod-1"], "were lost"),
        # A rank that failed after the loss of pods is no cause of its own.
        (
            ["pod-2", "pod-1"],
            RunFault(kind="DistBackendError", rank=0, pod="pod-0"),
            ["pod-1", "pod-2"],
            "pod-1 and pod-2 were lost",
        ),
        ([], KILLED, [], "rank 1 on pod-1 was killed by"),
        ([], replace(KILLED, message="killed by SIGTERM"), [], "rank 1 on pod-1 was killed by"),
        ([], replace(KILLED, message=f"{KILLED.message}; its memory limit was reached"), [], ""),
        ([], replace(KILLED, message="killed by SIGSEGV"), [], ""),
        ([], replace(KILLED, kind="ValueError"), [], ""),
        ([], RunFault(kind="network", message="no sign from any pod"), [], ""),
        ([], RunFault(kind="stall", rank=0, message="no step for 60 s"), [], ""),
        (["pod-0"], None, [], ""),
    ],
)
def test_only_a_pod_or_rank_that_was_lost_from_outside_is_a_loss(
    lost: Sequence[str], fault: RunFault | None, pods: Sequence[str], what: str
) -> None:
    end = AttemptEnd(fault=fault, lost=lost, time_s=5.5)
    loss = loss_of(end)
    assert (loss is not None) is bool(what)
    if loss is not None and fault is not None:
        assert what in loss.what
        assert (loss.pods, loss.why, loss.lost_s) == (pods, fault.message, 5.5)
    expected = DecisionKind.RESTARTED if what else Outcome.OVER
    assert judge(end, can_restart=True, can_repeat=True) is expected


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, Outcome.PORT_TAKEN),
        ({"port": 0}, Outcome.OVER),
        ({"port": 2950}, Outcome.OVER),
        ({"has_trained": True}, Outcome.OVER),
        ({"fault": replace(PORT, traceback="timed out")}, Outcome.OVER),
        ({"fault": None}, Outcome.OVER),
    ],
)
def test_an_attempt_is_repeated_for_its_own_port_before_a_step(
    changes: Any, outcome: Outcome
) -> None:
    end = replace(AttemptEnd(fault=PORT, port=29500), **changes)
    assert judge(end, can_restart=True, can_repeat=True) is outcome
    assert judge(end, can_restart=True, can_repeat=False) is Outcome.OVER


@given(
    fault=st.sampled_from([None, KILLED, PORT, RunFault(kind="pod", pod="pod-1")]),
    lost=st.sampled_from([(), ("pod-0",)]),
    unwanted=st.booleans(),
)
def test_a_run_without_a_fault_or_a_restart_left_or_a_wish_to_go_on_is_over(
    fault: RunFault | None, lost: Sequence[str], unwanted: bool
) -> None:
    end = AttemptEnd(fault=fault, lost=lost, is_unwanted=unwanted)
    assert judge(end, can_restart=False, can_repeat=False) is Outcome.OVER
    if fault is None or unwanted:
        assert judge(end, can_restart=True, can_repeat=False) is Outcome.OVER


@pytest.mark.parametrize(("unwatched", "rebooted"), [(False, True), (True, False), (True, True)])
def test_a_rank_that_ended_with_its_agent_is_named_with_the_cause(
    unwatched: bool, rebooted: bool
) -> None:
    seen = ledger(rank(0, done=True), rank(1, stopped=True))
    fault = stopped_by_others(seen, unwatched=unwatched, rebooted=rebooted)
    assert (fault.rank, fault.pod, fault.host, fault.kind) == (1, "pod-1", B.address, "pod")
    said = {
        "agent": says(fault.message, "was ended together with the agent of the pod"),
        "keeper": says(fault.message, "no new keeper came within the lease of the pod's agent"),
        "reboot": says(fault.message, "ended with the pod when this machine was rebooted"),
    }
    cause = "agent"
    if unwatched:
        cause = "reboot" if rebooted else "keeper"
    assert [name for name, is_said in said.items() if is_said] == [cause]


def test_a_rank_that_only_lost_its_peer_is_no_cause() -> None:
    echo = RankError(kind="DistBackendError", message="Connection reset", echo=True)
    seen = ledger(rank(0, exit_code=1, error=echo), rank(1, exit_code=0, done=True))
    fault = blame(seen, unwatched=True, rebooted=False)
    assert fault is not None and (fault.rank, fault.kind) == (0, "pod")
    seen.lost["pod-1"] = "evicted"
    assert blame(seen, unwatched=False, rebooted=False) is None, "the lost pod is the cause"
    own = rank(0, exit_code=1, error=replace(echo, echo=False))
    seen.ranks[0] = own
    fault = blame(seen, unwatched=True, rebooted=False)
    assert fault is not None and fault.kind == "DistBackendError"


@pytest.mark.parametrize(
    ("ranks", "fault", "asked", "state"),
    [
        ([rank(0, done=True), rank(1, done=True)], None, True, "succeeded"),
        ([rank(0, done=True), rank(1, done=True)], KILLED, True, "failed"),
        ([rank(0, done=True), rank(1, stopped=True)], None, True, "stopped"),
        ([rank(0, done=True), rank(1, stopped=True)], None, False, "cancelled"),
        ([rank(0, done=True), rank(1, stopped=True, forced=True)], None, True, "cancelled"),
        ([], None, True, "cancelled"),
    ],
)
def test_the_final_state_follows_from_ranks_fault_and_request(
    ranks: Sequence[RankStatus], fault: RunFault | None, asked: bool, state: str
) -> None:
    assert final_state(ledger(*ranks), fault, asked_to_stop=asked) == state
