"""Which losses let a run continue, from what it continues, and how its history reads then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.eventlines import format_event
from tests.support.sentences import says, sentence
from tests.support.takeover import curve
from workbench.base.errors import ConfigError, RunError
from workbench.base.files import read_json, write_json
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.submit.resume import write_resumption
from workbench.jobs.script import Script
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.launch import place_ranks
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.run.policy import Loss
from workbench.keeper.run.restart import (
    _why_fresh,
    inherited_ranks,
    replace_lost_pods,
    restart_on,
)
from workbench.keeper.watch.ledger import RunLedger
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.checkpoints import write_manifest
from workbench.rundir.events import Event, parse_event, read_events
from workbench.rundir.journal import Journal
from workbench.rundir.make.prepare import prepare_run
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import Restart
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView


def test_a_restart_from_the_beginning_names_the_checkpoint_that_was_not_whole() -> None:
    assert says(
        _why_fresh(10, 0, PulledCheckpoints()),
        "was not whole here yet when the loss was noticed",
        10,
    )
    assert _why_fresh(10, 10, PulledCheckpoints()) == _why_fresh(0, 0, PulledCheckpoints()) == ""


def context_of(left: Mapping[str, str], hold: threading.Event | None = None) -> Any:
    def restore(_lost: object) -> Mapping[str, str]:
        if hold is not None:
            hold.wait(300)
        return left

    links = [SimpleNamespace(pod=SimpleNamespace(name=f"pod-{i}")) for i in range(2)]
    return SimpleNamespace(restore=restore, links=links, refresh=list)


def test_what_stays_lost_is_left_out_and_the_last_pod_is_too_many() -> None:
    links = replace_lost_pods(
        context_of({"pod-1": "its host does not answer"}), ["pod-1"], StopRequests()
    )
    assert [link.pod.name for link in links or ()] == ["pod-0"]
    with pytest.raises(RunError, match="its host does not answer; so does this"):
        left = {"pod-1": "its host does not answer", "pod-0": "so does this"}
        replace_lost_pods(context_of(left), ["pod-0", "pod-1"], StopRequests())


NOTHING = SimpleNamespace(phases=[], inherited=False, attempt=0, restart=0)


@pytest.mark.parametrize("over", [False, True])
def test_a_run_that_is_over_and_unknown_on_its_pods_is_not_begun_again(
    tmp_path: Path, over: bool
) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    context: Any = SimpleNamespace(
        everywhere=lambda _action: [NOTHING, NOTHING],
        paths=paths,
        run_id="r",
        unstartable="",
        decided=None,
    )
    if not over:
        assert inherited_ranks(context) is None, "it begins now"
        return
    write_json(paths.manifest, {})
    with pytest.raises(RunError, match=sentence("the pods have no record of the run any more")):
        inherited_ranks(context)


def test_nobody_waits_for_a_pod_of_a_run_that_is_cancelled() -> None:
    hold, requests = threading.Event(), StopRequests()
    threading.Timer(0.1, requests.cancel.set).start()
    assert replace_lost_pods(context_of({}, hold), ["pod-1"], requests) is None
    hold.set()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A prepared run of three ranks."""
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 24, "eval_rows": 4},
        technique="zero1",
        restarts=1,
    )
    return prepare_run(RunSpec(cluster=ClusterSpec(count=3), job=job), root=tmp_path / "run").paths


def checkpoint(paths: RunPaths, step: int, ranks: int) -> None:
    for rank in range(ranks):
        part = paths.checkpoints / f"step-{step}" / f"pod-{rank}" / f"rank-{rank}"
        part.mkdir(parents=True)
        (part / "state.json").write_text("{}")
        write_manifest(part, step=step, rank=rank, world_size=ranks)


def resumption(
    paths: RunPaths, ranks: int, last_step: int | None = None
) -> tuple[int, dict[str, Any]]:
    step, batch = write_resumption(paths.root, gpus=0, before=3, ranks=ranks, last_step=last_step)
    assert batch is None, "24 rows are shared evenly by one, two and three"
    return step, read_json(paths.job)


def test_a_run_goes_on_from_its_own_newest_good_checkpoint(paths: RunPaths) -> None:
    for step in (2, 4, 6):
        checkpoint(paths, step, 3)
    (paths.checkpoints / "step-6" / "pod-1" / "rank-1" / "state.json").write_text("damaged")
    step, made = resumption(paths, 3)
    assert (step, made["resume"]["step"], made["job"]["resume"]) == (4, 4, str(paths.root))
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step-2", "step-4"]
    assert resumption(paths, 3, last_step=4)[0] == 2, "after the last step nothing is left to do"


def test_before_the_first_checkpoint_fewer_ranks_begin_again_with_the_same_batch(
    paths: RunPaths,
) -> None:
    before = read_json(paths.job)
    step, made = resumption(paths, 2)
    assert step == 0
    assert "resume" not in made
    micro, accumulation = (
        made["job"]["per_device_train_batch_size"],
        made["job"]["gradient_accumulation_steps"],
    )
    assert (micro * accumulation * 2, before["job"]["per_device_train_batch_size"] * 3) == (24, 24)
    assert read_json(paths.deepspeed) == made["deepspeed"]


def test_fewer_ranks_go_on_from_a_checkpoint_of_more_with_the_same_batch(paths: RunPaths) -> None:
    checkpoint(paths, 4, 3)
    step, made = resumption(paths, 2)
    assert (step, made["resume"]["step"], len(made["resume"]["parts"]), made["ranks"]) == (
        4,
        4,
        3,
        2,
    )
    assert FineTune.from_dict(made["job"]).global_batch(2) == 24


def test_a_user_s_own_batch_sizes_do_not_keep_fewer_ranks_from_going_on(paths: RunPaths) -> None:
    made = read_json(paths.job)
    write_json(
        paths.job, {**made, "deepspeed": {**made["deepspeed"], "train_micro_batch_size_per_gpu": 8}}
    )
    _, made = resumption(paths, 2)
    assert made["deepspeed"]["train_micro_batch_size_per_gpu"] == "auto"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"technique": "local-sgd"}, "each rank of local-sgd has weights of its own"),
        ({"optimizer": "adamw-8bit"}, "the states of adamw-8bit are in blocks"),
        ({}, "round_robin_gradients puts weights in an order"),
    ],
)
def test_what_cannot_be_cut_anew_says_why_it_stops(
    paths: RunPaths, options: dict[str, object], why: str
) -> None:
    checkpoint(paths, 4, 3)
    made = read_json(paths.job)
    config = (
        {"zero_optimization": {"stage": 1, "round_robin_gradients": True}} if not options else None
    )
    write_json(paths.job, {**made, "job": {**made["job"], **options}, "deepspeed": config})
    with pytest.raises(
        ConfigError,
        match=rf"checkpoint of step 4 in .* is of 3 ranks, and the new run has 2; {why}",
    ):
        resumption(paths, 2)


@pytest.mark.parametrize(
    ("micro", "before", "ranks", "expected"),
    [
        (8, 4, 2, (8, 2)),
        (8, 3, 2, (6, 2)),
        (8, 8, 7, (3, 3)),
        (1, 4, 3, (1, 1)),
        (2, 1, 3, (1, 1)),
        (4, 2, 3, (3, 1)),
    ],
)
def test_the_batch_stays_as_near_as_it_can(
    micro: int, before: int, ranks: int, expected: tuple[int, int]
) -> None:
    job = FineTune(per_device_train_batch_size=micro).on_ranks(ranks, before=before)
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps) == expected


def test_a_batch_that_cannot_stay_is_told(paths: RunPaths) -> None:
    made = read_json(paths.job)
    write_json(paths.job, {**made, "job": {**made["job"], "per_device_train_batch_size": 1}})
    assert write_resumption(paths.root, gpus=0, before=3, ranks=2, last_step=None) == (0, 2)
    restart = Restart(what="pod-2 was lost", lost_step=9, step=6, pods=2, batch=2)
    assert (
        str(restart)
        == "pod-2 was lost at step 9; went on from step 6 with 2 pods and 2 rows a step"
    )


@pytest.fixture
def restarted(tmp_path: Path) -> RunPaths:
    """A run directory whose run went back from step 5 to step 3."""
    paths = RunPaths(tmp_path)
    journal = Journal(paths)
    for step in (1, 2, 3, 4, 5):
        journal.event(event("step", 100.0 + step, step=step, max_steps=6, loss=1.0 / step))
    loss = {
        "what": "pod-1 was lost",
        "why": "evicted",
        "lost_step": 5,
        "step": 3,
        "pods": 2,
        "ranks": 2,
    }
    journal.event(Event(time_s=116.0, rank=None, kind="restarted", data={**loss, "lost_s": 106.0}))
    journal.event(event("resumed", 117.0, step=3))
    journal.event(event("first_step", 120.0))
    for step in (4, 5, 6):
        journal.event(event("step", 116.0 + step, step=step, max_steps=6, loss=2.0 / step))
    journal._close_scalars()
    return paths


def event(kind: str, time_s: float, **data: object) -> Event:
    return Event(time_s=time_s, rank=0, kind=kind, data=data)


def test_the_attempts_of_a_run_are_one_history(restarted: RunPaths) -> None:
    (restarted.root / "run.json").write_text('{"id": "r", "submitted_s": 100}')
    steps = [(4, 0.5), (5, 0.4), (6, 2 / 6)]
    assert list(RunView(restarted.root).curves["loss"])[3:] == steps
    totals = RunTotals.of(read_events(restarted.events))
    (restart,) = totals.restarts
    assert str(restart) == "pod-1 was lost at step 5; went on from step 3 with 2 pods after 14 s"
    assert totals.facts(100.0)["restarts"] == [asdict(restart)]
    assert totals.progress(RunState.RUNNING, "").eta_s == 0.0
    assert curve(SimpleNamespace(paths=restarted)) == [1, 2, 3, 4, 4, 5, 5, 6]  # type: ignore[arg-type]


def test_tensorboard_shows_each_step_once(restarted: RunPaths) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(restarted.tensorboard)).Reload().Scalars("train/loss")
    assert [scalar.step for scalar in shown] == [1, 2, 3, 4, 5, 6]


def test_a_script_cannot_say_that_it_was_restarted() -> None:
    line = format_event("restarted", rank=0, what="nothing")
    assert parse_event(line, states=Script.traits.events) is None


@pytest.mark.parametrize(
    ("saved", "notes", "words"),
    [
        (None, [], "pod-1 was lost; began again with 3 pods"),
        (
            10,
            [],
            "began again (the checkpoint of step 10 was not "
            "whole here yet when the loss was noticed) with",
        ),
        (
            10,
            ["parts of the checkpoint of step 10 are on pod-1, out of reach"],
            "; parts of the checkpoint of",
        ),
    ],
)
def test_a_run_that_begins_again_says_why(
    paths: RunPaths, tmp_path: Path, saved: int | None, notes: list[str], words: str
) -> None:
    job = FineTune(
        dataset={"kind": "wikisql-mini", "train_rows": 24, "eval_rows": 4},
        technique="zero1",
        restarts=1,
    )
    spec = RunSpec(cluster=ClusterSpec(count=3), job=job)
    pods = [
        Pod(name=f"pod-{n}", address=f"10.0.0.{n}", host_key="ssh-ed25519 AAAA") for n in range(3)
    ]
    links: Any = [SimpleNamespace(pod=pod) for pod in pods]
    context = Alone(
        run_id="r",
        paths=paths,
        spec=spec,
        identity=Identity(tmp_path),
        refresh=lambda: pods,
        places=place_ranks(pods),
    )
    ledger = RunLedger(pods=["pod-0", "pod-1", "pod-2"], world_size=3)
    if saved:
        ledger.totals.take(event("checkpoint", 1.0, step=saved))
    loss = Loss(what="pod-1 was lost", why="gone", pods=["pod-1"], lost_s=1.0)
    new, restarted = restart_on(context, links, ledger.totals, loss, PulledCheckpoints(notes=notes))
    assert (new.attempt, new.restart) == (1, 0), "the decision has counted already"
    ledger.totals.take(restarted)
    assert words in str(ledger.totals.restarts[0])


class Alone(RunContext):
    """A run whose pods are asked nothing."""

    def everywhere(self, _action: object) -> list[Any]:
        return []
