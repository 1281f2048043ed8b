"""Runs that end early, and runs that continue from what they left: the loss curve of one run."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.haltedruns import JOB, STEPS, curve, guardian_of, run_for, send
from tests.support.poll import until
from tests.support.rankpids import pids_of
from tests.support.sentences import says
from workbench import Cluster, FineTune, LocalPods, PodSpec, Run
from workbench.base.errors import ConfigError
from workbench.base.process import find, rank_log
from workbench.rundir.checkpoints import newest_good
from workbench.rundir.events import parse_event
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        LocalPods(), PodSpec(cpus=1), count=2, path=tmp_path_factory.mktemp("c") / "cluster"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(cluster: Cluster) -> Run:
    """A run that nothing befell, some steps of which were traced."""
    run = submit(cluster, trace_steps=2)
    run.wait(300, progress=False).raise_for_status()
    return run


@pytest.fixture(scope="module")
def killed(cluster: Cluster) -> Run:
    """A run one of whose ranks was killed while it wrote a checkpoint."""
    run = submit(cluster, save_steps=1, checkpoints="bring")
    folder = Path(cluster.pods[1].root) / "runs" / run.id
    halt_at(run, folder / "rank-1", 1)
    assert not run.state.is_terminal, "checkpoints are carried here while it trains"
    until(
        lambda: stopped_while_writing(folder / "rank-1") and checkpoints_of(run)[1:],
        why=lambda: run.message,
    )
    send(signal.SIGKILL, pids_of(folder / "rank-1"))
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert (result.error.rank, result.error.kind) == (1, "signal")
    assert list(folder.glob("checkpoints/step-*/rank-1.part")), "it was killed while it wrote"
    return run


def submit(cluster: Cluster, **options: object) -> Run:
    return cluster.submit(FineTune(**{**JOB, **options}))  # type: ignore[arg-type]


def pid_of(rank: Path) -> int:
    until(lambda: pids_of(rank), why=lambda: f"nobody writes into {rank}")
    return pids_of(rank)[0]


def stopped_while_writing(rank: Path) -> bool:
    """Let a rank continue for a moment; tell whether it is writing its part of a checkpoint."""
    run_for(rank, 0.005)
    return bool(list(rank.parent.glob(f"checkpoints/step-*/{rank.name}.part")))


def checkpoints_of(run: Run) -> list[int]:
    return [int(str(e.data["step"])) for e in run.events() if e.kind == "checkpoint"]


def kept(run: Run) -> list[int]:
    """The steps whose checkpoints came back, every part of them."""
    steps = [
        path
        for path in run.paths.checkpoints.glob("step-*")
        if len(list(path.glob("pod-*/rank-*/manifest.json"))) == 2
    ]
    return sorted(int(path.name.removeprefix("step-")) for path in steps)


def test_a_killed_rank_and_a_lost_pod_cost_no_more_than_the_steps_since_the_last_checkpoint(
    cluster: Cluster, whole: Run
) -> None:
    run = submit(cluster, save_steps=2, restarts=2)
    rank, pod = Path(cluster.pods[1].root) / "runs" / run.id / "rank-1", cluster.pods[1]
    halt_at(run, rank, 2)
    os.kill(pid_of(rank), signal.SIGKILL)
    until(
        lambda: "rank 1 on pod-1 was killed by SIGKILL at step" in run.message,
        why=lambda: run.message,
    )
    halt_at(run, rank, kept(run)[-1] + 2)
    os.kill(json.loads((Path(pod.root) / "guardian.json").read_text())["pid"], signal.SIGKILL)
    result = run.wait(300, progress=False).raise_for_status()
    killed, lost = result.restarts
    assert killed.what == "rank 1 on pod-1 was killed by SIGKILL"
    assert (lost.what, lost.pods, lost.ranks) == ("pod-1 was lost", 2, 2)
    assert "SIGKILL" in lost.why
    assert killed.step is not None
    assert lost.step is not None
    assert 2 <= killed.step < lost.step < STEPS
    assert result.resumed_step == lost.step
    assert result.message == f"all ranks finished; {killed}; {lost}"
    assert all(
        (restart.took_s or 0) > 0 and restart.lost_step is not None for restart in result.restarts
    )
    assert curve(run) == curve(whole)
    assert [step for step, _ in RunView(run.path).curves["loss"]] == list(range(1, STEPS + 1))
    assert (result.steps, result.eval_loss) == (STEPS, whole.result.eval_loss)
    for attempt in range(3):
        log = run.paths.rank_log(attempt, 1, "stdout").read_text()
        assert log.count('"kind": "first_step"') == 1, "a log for every attempt"
        assert "\0" not in log
    joined = run.logs(1, tail=None)
    assert [line for line in joined.splitlines() if line.startswith("--- restart")] == [
        f"--- restart {number}: {restart.what} ---"
        for number, restart in enumerate(result.restarts, start=1)
    ]
    assert {pod.phase for pod in cluster.pods} == {"Running"}


def test_a_pod_that_is_told_to_end_leaves_a_checkpoint_of_its_step_and_the_run_continues(
    cluster: Cluster, whole: Run
) -> None:
    """As a spot instance does, and a drained node: SIGTERM, and the kill some seconds later."""
    run = submit(cluster, restarts=1)
    pod = cluster.pods[1]
    rank = Path(pod.root) / "runs" / run.id / "rank-1"

    def steps_told() -> int:
        """The steps that rank 0 told, from its own file: what came here lags behind under load."""
        try:
            told = Path(cluster.pods[0].root, "runs", run.id, rank_log(0, 0, "stdout")).read_text()
        except FileNotFoundError:
            return 0
        return sum(
            event.kind == "step" for line in told.splitlines() if (event := parse_event(line))
        )

    def has_begun() -> bool:
        run_for(rank, 0.02)
        return steps_told() >= 3

    until(has_begun, 240.0, why=lambda: run.message)
    os.kill(guardian_of(pod.root), signal.SIGTERM)
    until((rank / "leave-asked").exists, 120.0, why=lambda: run.message)
    begun = steps_told()
    halt_at(run, rank, 1)
    (step,) = checkpoints_of(run)
    assert begun <= step < STEPS, "of a step soon after the notice, without save_steps"
    assert kept(run) == [step]
    notes = [str(e.data["message"]) for e in run.events() if e.kind == "note"]
    assert f"a pod is ending (SIGTERM): checkpoint after step {step}" in notes
    # The platform's patience is over.
    with contextlib.suppress(ProcessLookupError):
        os.kill(guardian_of(pod.root), signal.SIGKILL)
    result = run.wait(300, progress=False).raise_for_status()
    (restart,) = result.restarts
    assert (restart.what, restart.step) == ("pod-1 was lost", step)
    assert curve(run) == curve(whole) and result.eval_loss == whole.result.eval_loss


def test_the_last_two_checkpoints_come_back_from_a_run_that_was_killed(killed: Run) -> None:
    steps = kept(killed)
    assert steps == checkpoints_of(killed)[-2:], "the one that was being written counts for nothing"
    assert killed.message.endswith(
        f"resume=run.path continues from the checkpoint of step {steps[-1]}"
    )
    assert [path.name for path in killed.paths.checkpoints.iterdir() if "part" in path.name] == []


def test_a_damaged_checkpoint_is_left_out_and_the_one_before_is_used(
    cluster: Cluster, killed: Run, whole: Run
) -> None:
    """The run goes on as if neither the kill nor the damage had been."""
    older, newer = kept(killed)
    damaged = next(killed.paths.checkpoints.glob(f"step-{newer}/pod-1/rank-1/state.safetensors"))
    flip(damaged)
    try:
        run = submit(cluster, resume=str(killed.path))
        result = run.wait(300, progress=False).raise_for_status()
    finally:
        flip(damaged)
    assert curve(run) == {
        step: figures for step, figures in curve(whole).items() if int(str(step)) > older
    }
    assert len(curve(run)) == STEPS - older
    before = whole.result
    assert (result.steps, result.resumed_step, result.eval_loss) == (STEPS, older, before.eval_loss)
    assert before.resumed_step is None
    started = next(e for e in run.events() if e.kind == "start")
    assert started.data["tokens_kept"], "the pods have the tokens of the runs before"
    assert result.first_eval_loss == before.first_eval_loss
    said = (
        f"the checkpoint of step {newer} was left out: the "
        "checksum of rank-1/state.safetensors is wrong (pod-1)"
    )
    assert said in result.message
    assert f"the run continued from step {older}" in result.message


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"technique": "zero2"}, "technique is 'zero2' and was 'zero1'"),
        (
            {"per_device_train_batch_size": 4, "seed": 3},
            "seed is 3 and was 0; per_device_train_batch_size is 4 and was 2",
        ),
        (
            {"dataset": {"kind": "wikisql-mini", "train_rows": 61, "eval_rows": 4}},
            "the training rows differ",
        ),
        ({"max_steps": 1}, "max_steps is 1, no step is left after the checkpoint"),
        ({"resume": "/nowhere"}, "'/nowhere', not the directory of a FineTune run"),
    ],
)
def test_another_training_is_refused_before_anything_starts(
    cluster: Cluster, killed: Run, options: dict[str, object], said: str
) -> None:
    before = len(cluster.runs)
    with pytest.raises(ConfigError) as refused:
        submit(cluster, **{"resume": str(killed.path), **options})
    assert said in str(refused.value)
    assert len(cluster.runs) == before


def test_a_run_that_is_stopped_leaves_a_checkpoint_too(cluster: Cluster) -> None:
    run = submit(cluster, technique="single", max_steps=5000, save_steps=5000, checkpoints="bring")
    until(lambda: curve(run))
    run.stop()
    result = run.wait(300, progress=False)
    assert result.state is RunState.STOPPED
    assert checkpoints_of(run) == [result.steps]
    assert f"resume=run.path continues from the checkpoint of step {result.steps}" in result.message
    assert list(run.paths.checkpoints.glob("*/*/*")) == [
        run.paths.checkpoints / f"step-{result.steps}/pod-0/rank-0"
    ]


def test_a_killed_agent_keeps_no_checkpoint_out_of_reach(cluster: Cluster) -> None:
    """Its pod lives, and has another agent at once."""
    run = submit(cluster, save_steps=1, max_steps=200)
    until(lambda: len(checkpoints_of(run)) > 2)
    os.kill(
        json.loads((Path(cluster.pods[1].root) / "agent.json").read_text())["pid"], signal.SIGKILL
    )
    result = run.wait(300, progress=False)
    assert result.state is RunState.FAILED
    assert result.error is not None
    assert says(result.error.message, "the ranks on the pod died with the agent", "pod-1")
    assert "out of reach" not in result.message
    last = max(checkpoints_of(run))
    resumed = (
        submit(cluster, max_steps=last + 3, resume=str(run.path))
        .wait(300, progress=False)
        .raise_for_status()
    )
    assert resumed.steps == last + 3
    assert resumed.resumed_step is not None
    assert resumed.resumed_step >= last - 1


@pytest.fixture(scope="module")
def left(cluster: Cluster, killed: Run) -> Run:
    """A run that was cancelled and left its checkpoints where they were written."""
    run = submit(cluster, save_steps=1)
    rank = Path(cluster.pods[1].root) / "runs" / run.id / "rank-1"
    until(lambda: (rank.parent / rank_log(0, 1, "stdout")).exists())
    pid = pid_of(rank)
    until(lambda: a_moment_later(pid) and len(on_the_pods(cluster, run)) > 1, every_s=0.005)
    run.cancel()
    assert run.wait(300, progress=False).state is RunState.CANCELLED
    return run


def a_moment_later(pid: int) -> bool:
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    return True


def on_the_pods(cluster: Cluster, run: Run) -> list[int]:
    """The steps whose checkpoints lie whole on the pods."""
    held = [Path(pod.root) / "runs" / run.id / "checkpoints" for pod in cluster.pods]
    parts = [
        {int(path.parent.parent.name[5:]) for path in each.glob("step-*/rank-?/manifest.json")}
        for each in held
    ]
    return sorted(set.intersection(*parts))


def test_checkpoints_stay_on_the_pods_unless_asked_for(cluster: Cluster, left: Run) -> None:
    last = on_the_pods(cluster, left)[-1]
    assert not left.paths.checkpoints.exists(), "nothing travelled"
    said = (
        f"resume=run.path continues from the checkpoint of step {last}; "
        "the checkpoint is on the pods, and is copied back when the"
    )
    assert said in left.message


def test_a_run_goes_on_from_a_checkpoint_on_the_pods_where_it_lies(
    cluster: Cluster, left: Run, whole: Run
) -> None:
    """Of the last two, the second is damaged on one of the pods."""
    older, newer = on_the_pods(cluster, left)[-2:]
    damaged = (
        Path(cluster.pods[1].root)
        / "runs"
        / left.id
        / f"checkpoints/step-{newer}/rank-1/state.safetensors"
    )
    flip(damaged)
    try:
        run = submit(cluster, resume=str(left.path))
        result = run.wait(300, progress=False).raise_for_status()
    finally:
        flip(damaged)
    assert result.resumed_step == older
    assert curve(run) == {
        step: figures for step, figures in curve(whole).items() if int(str(step)) > older
    }
    said = (
        f"the checkpoint of step {newer} was left out: the "
        "checksum of rank-1/state.safetensors is wrong (pod-1)"
    )
    assert said in result.message
    assert not left.paths.checkpoints.exists()


def test_another_number_of_ranks_goes_on_from_what_lies_on_the_pods(
    cluster: Cluster, left: Run, whole: Run
) -> None:
    newer, held = on_the_pods(cluster, left)[-1], left.paths.held.read_bytes()
    said = (
        r"batch is 2 rows on 1 ranks and was 4 on 2 "
        r"\(per_device_train_batch_size=2, gradient_accumulation_steps=2\)"
    )
    with pytest.raises(ConfigError, match=said):
        cluster.submit(FineTune(**{**JOB, "resume": str(left.path)}), pods=1)  # type: ignore[arg-type]
    assert kept(left) == [newer], "a rank needs all parts, so they come here first"
    alone = {"per_device_train_batch_size": 4, "technique": "zero1", "resume": str(left.path)}
    run = cluster.submit(FineTune(**{**JOB, **alone}), pods=1)  # type: ignore[arg-type]
    result = run.wait(300, progress=False).raise_for_status()
    assert (result.resumed_step, result.steps, len(result.workers)) == (newer, STEPS, 1)
    losses, expected = (
        {step: loss for step, (loss, _) in curve(each).items()} for each in (run, whole)
    )
    assert losses == pytest.approx(
        {step: expected[step] for step in range(newer + 1, STEPS + 1)}, rel=1e-4
    )
    assert result.eval_loss == pytest.approx(whole.result.eval_loss, rel=1e-4)
    left.paths.held.write_bytes(held)  # they still lie there, for those who come next
    shutil.rmtree(left.paths.checkpoints)


def test_what_a_run_that_did_not_succeed_left_on_its_pods_comes_back_when_they_go(
    cluster: Cluster, left: Run
) -> None:
    last = on_the_pods(cluster, left)[-1]
    cluster.close()
    assert kept(left) == [last]
    assert left.message.endswith(f"the checkpoint of step {last} was copied back")
    assert not left.paths.held.exists()
    assert newest_good(left.path).step == last


def test_epochs_workers_and_a_trace_are_told(whole: Run) -> None:
    result = whole.result
    assert sum(epoch.steps for epoch in result.epoch_times) == STEPS
    assert [(worker.rank, worker.pod) for worker in result.workers] == [(0, "pod-0"), (1, "pod-1")]
    for worker in result.workers:
        assert worker.threads == 1
        assert worker.seconds is not None and worker.seconds > 0
        assert worker.peak_rss_gib is not None and worker.peak_rss_gib > 0.1
        assert worker.cores
    assert result.gpus == ()
    text = str(whole)
    assert says(text, "Epochs, without evaluations and checkpoints") and "Workers" in text
    assert result.trace is not None
    assert says(
        result.trace.caption, "opens in https://ui.perfetto.dev and chrome://tracing", "2–3"
    )
    assert any("aten::" in str(row[0]) for row in result.trace.rows)
    with gzip.open(whole.paths.trace) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    card = result.to_html(whole.path / "card.html").read_text()
    assert "Trace" in card and says(card, "opens in https://ui.perfetto.dev and chrome://tracing")


def halt_at(run: Run, rank: Path, step: int) -> None:
    """Stop a rank once a checkpoint of this step or later has come here; by turns, for time."""

    def has_come() -> bool:
        parts = rank.parent.glob(f"checkpoints/step-*/{rank.name}/manifest.json")
        written = any(int(part.parent.parent.name.removeprefix("step-")) >= step for part in parts)
        # Once it has written its part it need not get far
        # until that comes: the keeper looks twice a second.
        run_for(rank, 0.002 if written else 0.02)
        time.sleep(0.1 if written else 0.0)
        return bool(pids_of(rank)) and any(kept_step >= step for kept_step in kept(run))

    until(has_come, 240.0, why=lambda: run.message)


def test_a_pod_without_a_rank_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with Cluster(LocalPods(), PodSpec(cpus=1), path=tmp_path / "c", warm=False) as cluster:
        guardian = guardian_of(cluster.pods[0].root)
        os.kill(guardian, signal.SIGTERM)
        until(lambda: find(guardian) is None, why=lambda: "the guardian lives")
