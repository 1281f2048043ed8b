"""The final state of a run and its message, from a ledger: no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runloop import Simulation
from tests.keeper.acts import script
from tests.support.sentences import says
from workbench.base.errors import PodError, RemoteError
from workbench.base.files import write_json
from workbench.jobs.script import Script
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.link.agent import PodGone
from workbench.keeper.link.context import RunContext
from workbench.keeper.run import verdict as module
from workbench.keeper.run.outputs import PulledOutputs
from workbench.keeper.run.verdict import (
    fault_of,
    in_users_files,
    lost_pod,
    place_words,
    verdict,
)
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Phase, Pod
from workbench.rundir.checkpoints import Checkpoint
from workbench.rundir.events import Event
from workbench.rundir.outcome import RankStatus
from workbench.rundir.result import RunFault

A, B = Pod(name="pod-0", address="10.0.0.0"), Pod(name="pod-1", address="10.0.0.1")
FAULT = RunFault(kind="ValueError", rank=0, pod="pod-0", message="a bad row", traceback="line 3")


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return Simulation(tmp_path, script()).context()


def rank(number: int, **state: Any) -> RankStatus:
    return RankStatus(rank=number, pod=(A, B)[number], phase="exited", **state)


def ledger(*ranks: RankStatus) -> RunLedger:
    """Return the ledger of two ranks; both are done by default."""
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2)
    given = ranks or (rank(0, done=True), rank(1, done=True))
    for each in given:
        seen.record(PodReport(pod=each.pod, ranks=[each], drained=True))
    return seen


def decided(
    context: RunContext,
    seen: RunLedger,
    *,
    live: int | None = 0,
    fault: RunFault | None = None,
    returned: PulledCheckpoints | None = None,
    brought: PulledOutputs | None = None,
    asked: bool = False,
) -> tuple[str, str]:
    state, message = verdict(
        context,
        seen,
        live,
        fault,
        returned or PulledCheckpoints(),
        brought or PulledOutputs(),
        asked_to_stop=asked,
    )
    return str(state), message


def stopped_at(seen: RunLedger, step: int) -> RunLedger:
    seen.totals.take(Event(time_s=1.0, rank=0, kind="stopped", data={"step": step}))
    return seen


# Final states.


def test_a_run_whose_ranks_are_done_succeeded_and_says_no_more(context: RunContext) -> None:
    state, message = decided(context, ledger(), returned=PulledCheckpoints(steps=[4]))
    assert (state, says(message, "all ranks finished")) == (
        "succeeded",
        True,
    )
    assert ";" not in message, "a checkpoint of a run that succeeded is nothing to resume"


def test_variables_that_the_run_decides_are_named_as_not_used(context: RunContext) -> None:
    job = context.spec.job.replace(env={"MASTER_PORT": "29500", "SEED": "1"})
    context = replace(context, spec=context.spec.replace(job=job))
    _, message = decided(context, ledger())
    assert says(message, "env does not set {}: the run decides the values", "MASTER_PORT")
    assert "SEED" not in message


def test_a_fault_has_the_state_and_the_words_without_its_traceback(context: RunContext) -> None:
    state, message = decided(
        context, ledger(), fault=FAULT, returned=PulledCheckpoints(steps=[4, 2])
    )
    assert (state, "a bad row" in message, "line 3" in message) == ("failed", True, False)
    assert says(message, "resume=run.path continues from the checkpoint of step", 4)
    assert not says(message, "and is copied back when the cluster closes")


def test_a_checkpoint_on_pods_is_said_to_be_there(context: RunContext) -> None:
    write_json(context.paths.held, {})
    _, message = decided(context, ledger(), fault=FAULT, returned=PulledCheckpoints(steps=[4]))
    assert says(message, "and is copied back when the cluster closes")


def test_a_trainer_that_stopped_names_its_step(context: RunContext) -> None:
    state, message = decided(
        context, stopped_at(ledger(), 3), returned=PulledCheckpoints(steps=[2])
    )
    assert (state, says(message, "stopped after step", 3)) == ("stopped", True)
    assert says(message, "resume=run.path continues from the checkpoint of step", 2)
    state, message = decided(context, stopped_at(ledger(), 3))
    assert (state, says(message, "stopped after step", 3)) == ("stopped", True)


def test_a_trainer_that_stopped_after_a_save_names_the_checkpoint(context: RunContext) -> None:
    state, message = decided(
        context, stopped_at(ledger(), 4), returned=PulledCheckpoints(steps=[4, 2])
    )
    assert (state, says(message, "stopped after a checkpoint at step", 4)) == ("stopped", True)


@pytest.mark.parametrize(
    ("asked", "forced", "state"),
    [(True, False, "stopped"), (False, False, "cancelled"), (True, True, "cancelled")],
)
def test_ranks_that_end_when_asked_are_stopped_and_killed_ones_cancelled(
    asked: bool, forced: bool, state: str, context: RunContext
) -> None:
    seen = ledger(rank(0, stopped=True), rank(1, stopped=True, forced=forced))
    found, message = decided(context, seen, asked=asked)
    assert (found, says(message, "stopped when asked")) == (state, True)
    assert says(message, "ranks {} did not end when asked and were killed", "[1]") is forced


def test_a_run_without_ranks_is_cancelled(context: RunContext) -> None:
    seen = RunLedger(pods=["pod-0", "pod-1"], world_size=2)
    assert decided(context, seen, asked=True)[0] == "cancelled"


def asked_at(s: float, *asked: str, ends: Sequence[float | None] = (103.2, 106.4)) -> RunLedger:
    """Return the ledger of ranks that were asked to stop at a time."""
    seen = ledger(
        *(
            rank(number, stopped=True, asked=how, ended_s=ends[number])
            for number, how in enumerate(asked)
        )
    )
    seen.asked_s = s
    return seen


def test_a_stop_says_how_long_the_last_rank_took_and_the_signal(context: RunContext) -> None:
    _, message = decided(context, asked_at(100.0, "SIGINT", "SIGTERM"), asked=True)
    assert says(message, ": the ranks ended by themselves within {} s", 7, "SIGINT", "SIGTERM")


def test_a_stop_without_a_signal_names_none(context: RunContext) -> None:
    _, message = decided(context, asked_at(100.0, "", ""), asked=True)
    assert says(message, ": the ranks ended by themselves within {} s", 7)
    assert message.endswith("7 s")


def test_a_stop_takes_a_second_at_least(context: RunContext) -> None:
    seen = asked_at(100.0, "SIGTERM", "SIGTERM", ends=[100.1, 100.2])
    assert says(
        decided(context, seen, asked=True)[1],
        ": the ranks ended by themselves within {} s",
        1,
    )


def test_a_stop_of_trainers_says_so(context: RunContext) -> None:
    _, message = decided(context, asked_at(100.0, "Trainer", "Trainer"), asked=True)
    assert says(message, "and the ranks by themselves within", 7)
    _, message = decided(context, asked_at(100.0, "Trainer", "SIGTERM"), asked=True)
    assert says(message, ": the ranks ended by themselves within {} s", 7, "Trainer")


def test_a_stop_without_a_time_says_no_seconds(context: RunContext) -> None:
    for seen in (asked_at(0.0, "", ""), asked_at(100.0, "", "", ends=[None, None])):
        _, message = decided(context, seen, asked=True)
        assert says(message, "stopped when asked")
        assert not says(message, ": the ranks ended by themselves within {} s")


def test_ranks_that_had_to_be_killed_are_named_with_a_fault_too(context: RunContext) -> None:
    seen = ledger(rank(0, done=True), rank(1, stopped=True, forced=True))
    assert says(
        decided(context, seen, fault=FAULT)[1],
        "ranks {} did not end when asked and were killed",
        "[1]",
    )
    assert not says(
        decided(context, ledger(), fault=FAULT)[1],
        "ranks {} did not end when asked and were killed",
    )


# Notes.


def test_processes_on_a_pod_without_an_answer_are_noted(context: RunContext) -> None:
    assert says(
        decided(context, ledger(), live=None)[1], "processes there end with the agent's lease"
    )
    assert not says(
        decided(context, ledger(), live=0)[1], "processes there end with the agent's lease"
    )


def test_a_model_of_a_run_that_failed_is_noted(context: RunContext) -> None:
    seen = ledger()
    assert not says(
        decided(context, seen, fault=FAULT)[1], "the model was trained before: model/ has step"
    )
    seen.totals.model_step = 8
    assert not says(
        decided(context, seen, fault=FAULT)[1], "the model was trained before: model/ has step"
    ), "its files are not here"
    context.paths.model.mkdir()
    assert says(
        decided(context, seen, fault=FAULT)[1], "the model was trained before: model/ has step", 8
    )
    assert not says(decided(context, seen)[1], "the model was trained before: model/ has step")
    seen.totals.model_step = None
    assert not says(
        decided(context, seen, fault=FAULT)[1], "the model was trained before: model/ has step"
    )


def test_logs_that_are_incomplete_are_noted(context: RunContext) -> None:
    seen = ledger()
    seen.cut["pod-1"] = "the disk here is full"
    assert says(
        decided(context, seen)[1],
        "run.fetch() copies the rest back while the cluster exists",
        "the disk here is full",
    )


def test_notes_on_checkpoints_outputs_and_warnings_are_in_the_message(
    context: RunContext,
) -> None:
    seen = ledger()
    seen.full["pod-1"] = "no space on pod-1"
    returned = PulledCheckpoints(notes=["step 4 stayed"], stored=["step 2 is in the store"])
    brought = PulledOutputs(notes=["9 files stayed"], strange=["a.txt"])
    _, message = decided(context, seen, returned=returned, brought=brought)
    for note in (
        "no space on pod-1",
        "step 4 stayed",
        "step 2 is in the store",
        "9 files stayed",
        "a.txt",
    ):
        assert note in message


def test_a_resumed_run_names_its_step_unless_a_restart_does(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Checkpoint(step=7, parts={}, notes=["step 9 was damaged"])
    monkeypatch.setattr(module, "resumed_from", lambda _paths: chosen)
    _, message = decided(context, ledger())
    assert says(message, "the run continued from step", 7)
    assert "step 9 was damaged" in message
    seen = ledger()
    data = {"what": "pod-1 was lost", "step": 7, "pods": 2, "ranks": 2}
    seen.totals.take(Event(time_s=1.0, rank=None, kind="restarted", data=data))
    assert not says(decided(context, seen)[1], "the run continued from step")


class Needs:
    """An environment of packages, or notes on one that is not needed."""

    words = "trl 1.16.0"
    notes = ("the header of the script is ignored",)

    def __init__(self, *, installs: bool) -> None:
        self.installs = installs


@pytest.mark.parametrize("installs", [True, False])
def test_the_environment_of_the_ranks_is_noted(
    installs: bool, context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Script, "packages_in", lambda _job, _root: Needs(installs=installs))
    _, message = decided(context, ledger())
    assert says(message, "environment of the ranks", "trl 1.16.0") is installs
    assert Needs.notes[0] in message


def test_an_unreadable_list_of_packages_costs_no_outcome(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_job: object, _root: object) -> object:
        raise PodError("the list cannot be read")

    monkeypatch.setattr(Script, "packages_in", fail)
    assert decided(context, ledger())[0] == "succeeded"


# Faults without a failed rank.


def test_an_error_of_a_pod_is_blamed_on_the_pod(context: RunContext) -> None:
    fault = fault_of(context, RemoteError("no answer", host=B.address))
    assert (fault.kind, fault.pod, fault.host, fault.message) == (
        "RemoteError",
        "pod-1",
        B.address,
        "no answer",
    )
    assert fault_of(context, PodGone("evicted", host=A.address)).kind == "pod"
    assert fault_of(context, RemoteError("no answer", host="elsewhere")).pod == ""


def test_a_traceback_has_the_files_of_the_user() -> None:
    job = script()
    assert in_users_files("r", job, None) is None
    copy = "/pods/pod 0/runs/r/script/me"
    fault = replace(
        FAULT,
        message=f"cannot import name 'A' from 'token' ({copy}/token.py) or '{copy}/a.txt'",
        traceback=f'File "{copy}/train.py", line 3',
    )
    moved = in_users_files("r", job, fault)
    assert moved is not None
    assert moved.traceback == 'File "/home/me/train.py", line 3'
    assert moved.message == (
        "cannot import name 'A' from 'token' (/home/me/token.py) or '/home/me/a.txt'"
    )


def observed(context: RunContext, *pods: Pod, kind: str = "kubernetes") -> RunContext:
    """Return a context whose platform sees the pods in this state."""
    cluster = context.spec.cluster.replace(backend={"kind": kind})
    spec = context.spec.replace(cluster=cluster)
    return replace(context, spec=spec, refresh=lambda: list(pods))


def after(seen: RunLedger, seconds: float) -> RunLedger:
    """Return the ledger as many seconds later."""
    clock = seen.clock
    seen.clock = lambda: clock() + seconds
    return seen


def test_a_pod_is_blamed_while_another_was_heard_within_half_a_lease(
    context: RunContext,
) -> None:
    seen = ledger()
    seen.lost["pod-1"] = "no sign from pod-1 for 30 s"
    half_s = context.spec.cluster.lease_s / 2
    fault = lost_pod(observed(context), after(seen, half_s / 2))
    assert (fault.kind, fault.pod, fault.host) == ("pod", "pod-1", B.address)
    fault = lost_pod(observed(context), after(seen, half_s))
    assert (fault.kind, fault.pod) == ("network", "")
    assert says(fault.message, "no sign from any pod")


def test_a_single_pod_that_is_lost_is_no_lost_network(context: RunContext) -> None:
    seen = RunLedger(pods=["pod-0"], world_size=1, lost={"pod-0": "no sign from pod-0"})
    assert lost_pod(observed(context), after(seen, 1000.0)).kind == "pod"


def test_the_first_lost_pod_on_a_lost_node_is_blamed(context: RunContext) -> None:
    seen = ledger()
    seen.lost |= {"pod-0": "no sign from pod-0", "pod-1": "no sign from pod-1"}
    away = replace(B, phase=Phase.UNKNOWN, message="its node is not ready")
    fault = lost_pod(observed(context, replace(A, phase=Phase.RUNNING), away), seen)
    assert fault.pod == "pod-1"
    assert "no sign from pod-1" in fault.message and "its node is not ready" in fault.message


def test_the_platform_s_words_are_merged_and_name_their_pods(context: RunContext) -> None:
    def of(*messages: str, phase: Phase = Phase.RUNNING) -> str:
        pods = [
            replace(pod, phase=phase, message=message)
            for pod, message in zip((A, B), messages, strict=True)
        ]
        return place_words(observed(context, *pods, Pod(name="pod-9", message="of another run")))

    assert of("", "") == ""
    assert of("no quota", "no quota") == "no quota"
    assert of("", "no quota") == "pod-1: no quota"
    assert of("is pending", "no quota") == "pod-0: is pending; pod-1: no quota"
    assert of("evicted", "evicted", phase=Phase.FAILED) == "", "the loss has the words already"


def test_a_platform_that_does_not_answer_has_no_words(context: RunContext) -> None:
    def refuse() -> list[Pod]:
        raise PodError("the API server does not answer")

    assert place_words(replace(observed(context), refresh=refuse)) == ""


def test_hosts_without_a_platform_have_no_words(context: RunContext) -> None:
    seen = replace(B, message="no answer since 14:31")
    assert place_words(observed(context, A, seen, kind="ssh")) == ""
