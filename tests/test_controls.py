"""What a user does to a live run, over two local pods: look where its ranks are, and end it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.poll import until
from tests.support.sentences import says, sentence
from workbench import Cluster, FineTune, Run, Script, compare
from workbench.base.errors import RunError
from workbench.display.run.facts import RunFacts
from workbench.display.run.panel import RunButtons
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

pytestmark = pytest.mark.slow
BEAT = str(Path(__file__).parent / "scripts" / "beat.py")
ENDLESS = FineTune(
    dataset={"kind": "wikisql-mini", "train_rows": 200, "eval_rows": 20},
    max_steps=100_000,
    predict_rows=6,
    profile_step=0,
    per_device_train_batch_size=4,
    technique="zero1",
    logging_steps=3,
)


def trains(run: Run) -> bool:
    assert not run.state.is_terminal, run.message
    return any(event.kind == "step" for event in run.events())


@pytest.mark.long
def test_a_run_tells_where_it_is_and_stops_after_a_checkpoint(cluster: Cluster) -> None:
    from safetensors import safe_open

    run = cluster.submit(ENDLESS)
    behind = cluster.submit(ENDLESS)
    behind.stop()
    with pytest.raises(RunError, match=sentence("run {} is {}; only ranks that run have stacks")):
        behind.stacks()
    assert behind.result.message == "cancelled before its start"
    until(lambda: trains(run))

    stacks = run.stacks()
    assert sorted(stacks) == [0, 1]
    assert all("trainer.py" in text and "_train" in text for text in stacks.values()), stacks

    buttons = RunButtons(run, RunFacts(RunView(run.path)))
    buttons.hear({"click": "stacks"})
    until(lambda: "trainer.py" in buttons.widget.extra)
    buttons.hear({"click": "stop"})
    until(lambda: run.state.is_terminal or "stopping after a checkpoint" in run.message)
    run.stop()
    result = run.wait(300, progress=False)
    assert (result.state, result.error, result.left_processes) == (RunState.STOPPED, None, 0)
    stopped, *others = result.message.split("; ")
    assert stopped == f"stopped after a checkpoint at step {result.steps}"
    assert f"resume=run.path continues from the checkpoint of step {result.steps}" in others
    assert result.steps is not None and 3 <= result.steps < 1000
    assert result.predictions is None
    told = [event.data for event in run.events() if event.kind in ("step", "eval")]
    assert [data["step"] for data in told][-2:] == [result.steps] * 2, (
        "the last step is logged and evaluated"
    )
    assert result.eval_loss == told[-1]["eval_loss"]
    assert None not in (result.train_loss, result.train_samples_per_s, result.first_eval_loss)
    with safe_open(run.paths.model / "model.safetensors", "pt") as weights:
        assert list(weights.keys())
    run.stop()
    run.cancel()
    assert run.state is RunState.STOPPED
    assert says(result.message, "as the run was stopped (run.predict(rows) asks the model")
    assert "Continue: cluster.submit(" in str(run) and "Ask: run.predict(" in str(run)
    again = cluster.submit(run.spec.job.replace(resume=str(run.path), max_steps=result.steps + 2))
    assert again.wait(300, progress=False).raise_for_status().resumed_step == result.steps


def test_a_run_that_was_asked_to_stop_can_still_be_cancelled(cluster: Cluster) -> None:
    run = cluster.submit(ENDLESS.replace(technique="single"), pods=1)
    until(lambda: run.state is not RunState.QUEUED)
    run.stop()  # its ranks are not there yet: it is kept for them
    until(lambda: "stopping after a checkpoint" in run.message)
    run.cancel()
    result = run.wait(300, progress=False)
    assert (result.state, result.message, result.left_processes) == (
        RunState.CANCELLED,
        "stopped when asked",
        0,
    )
    evaluated = [
        event.whole("step")
        for event in run.events()
        if event.kind == "eval" and event.whole("step")
    ]
    assert result.eval_step == (evaluated[-1] if evaluated else None)
    assert (result.eval_loss is None) == (not evaluated), (
        "an evaluation that did not take place is not stated"
    )


def test_a_script_is_asked_to_stop_by_the_signal_that_it_listens_to(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.submit(Script(BEAT))
    until(lambda: beats(run))
    assert all("beat.py" in text for text in run.stacks().values())
    during = cluster.doctor()
    assert during.exchange is None
    assert f"run {run.path.name} is using the pods" in str(during)
    run.stop()
    run.stop()
    result = run.wait(300, progress=False)
    assert (result.state, result.error, result.left_processes) == (RunState.STOPPED, None, 0)
    assert re.fullmatch(
        r"stopped when asked: the ranks ended by themselves within \d+ s of SIGINT", result.message
    )
    assert all("KeyboardInterrupt" in run.logs(rank, "stderr") for rank in range(2)), (
        "Python made it an exception"
    )

    saves = tmp_path / "saves" / "saves.py"
    saves.parent.mkdir()
    saves.write_text(SAVES)
    run = cluster.submit(Script(saves, stop_grace_s=5, outputs=["*.txt"]))
    until(lambda: beats(run))
    run.stop()
    until(
        lambda: (
            run.state.is_terminal
            or "asked to stop; the ranks still alive after 5 s are killed" in run.message
        )
    )
    result = run.wait(300, progress=False)
    assert result.message.startswith(
        "stopped when asked: ranks [1] did not end when asked and were killed; outputs/ has"
    )
    assert (run.paths.outputs / "saved-0.txt").read_text() == "after SIGTERM"
    assert not (run.paths.outputs / "pod-1").exists()


SAVES = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    open(f"saved-{rank}.txt", "w").write("after SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, save if rank == "0" else lambda *_: None)
print("line 3", flush=True)
while True:
    time.sleep(0.05)
"""


def beats(run: Run) -> bool:
    assert not run.state.is_terminal, run.message
    logs = [run.paths.rank_log(0, rank, "stdout") for rank in range(2)]
    return all(log.exists() and "line 3" in log.read_text() for log in logs)


def share(part: int, whole: int) -> float:
    return part / whole


def answered(predictions: list[str], references: list[str]) -> int:
    assert all(references), references
    return len(predictions)


def over_the_lengths(predictions: list[str], references: list[str]) -> dict[str, float]:
    del predictions, references
    return {"share": share(1, 0)}


def test_what_fails_after_the_training_does_not_cost_the_model(
    cluster: Cluster, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.py"
    metrics.write_text(
        "import os\n"
        "import sys\n"
        "calls = []\n"
        "\n"
        "def ends(predictions, references):\n"
        "    calls.append(1)\n"
        "    return os._exit(3) if len(calls) > 1 else {}\n"
    )
    short = {
        "technique": "single",
        "max_steps": 2,
        "predict_rows": 0,
        "metric_rows": 2,
        "max_target_length": 4,
        "logging_steps": 1,
    }
    own: list[list[object]] = [[answered, over_the_lengths], [f"{metrics}:ends"]]
    runs = [cluster.submit(ENDLESS.replace(**short, metrics=each), pods=1) for each in own]
    raised, ended = (run.wait(300, progress=False) for run in runs)
    assert (raised.state, raised.eval_step, raised.metrics) == (
        RunState.SUCCEEDED,
        2,
        {"answered": 2.0},
    )
    assert (
        "the metric over_the_lengths is missing at step 0: ZeroDivisionError: division by zero"
        in raised.message
    )
    assert re.search(rf"\({re.escape(__file__)} line \d+: return part / whole\)", str(raised))
    # The spec names the file that was made of each: it starts the run again.
    made = RunSpec.load(runs[0].paths.spec, of_run=True).job
    assert isinstance(made, FineTune)
    inputs = runs[0].paths.inputs
    assert made.metrics == (
        f"{inputs}/0-answered-metric.py:answered",
        f"{inputs}/1-over_the_lengths-metric.py:over_the_lengths",
    )
    assert ended.state is RunState.FAILED and ended.eval_loss is None
    assert says(ended.message, "the model was trained before: model/ has step", 2)
    for run in runs:
        assert (run.paths.model / "model.safetensors").stat().st_size > 100_000
    both = compare(runs)
    assert [row[0] for row in both.options().rows] == ["metrics"]
    assert [row[1] for row in both.figures().rows] == ["succeeded", "failed"]
    assert all(f"{run.name}: " in str(both) for run in both.runs) and "<svg" in both._repr_html_()


def test_the_doctor_finds_the_pods_well_and_measures_between_them(cluster: Cluster) -> None:
    diagnosis = cluster.doctor()
    assert diagnosis.ok, str(diagnosis)
    assert [host.pod for host in diagnosis.hosts] == ["pod-0", "pod-1"]
    assert diagnosis.exchange is not None
    assert (diagnosis.exchange.pods, diagnosis.exchange.backend) == (2, "gloo")
    assert diagnosis.exchange.latency_s is not None
    assert "2 hosts: all checks passed" in str(diagnosis)
