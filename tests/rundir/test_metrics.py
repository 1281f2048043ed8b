"""A row of the table of metrics is all that a metric needs; numbers without a row work as well."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.writtenrun import WrittenRun, write_run
from workbench import Run, compare, history
from workbench.base.display_protocol import as_bundle
from workbench.base.errors import ConfigError
from workbench.display.kit.doc import to_html
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import run_view_doc
from workbench.finetune.options.reported import perplexity
from workbench.rundir.catalog.store import record_of
from workbench.rundir.events import Event, EventKind, read_events
from workbench.rundir.figures import metrics
from workbench.rundir.figures.curves import ScalarWriter
from workbench.rundir.figures.metric import Better, Metric
from workbench.rundir.figures.metrics import METRICS, curves_of, less_is_better, rows
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView


def test_a_step_without_a_loss_keeps_the_loss_of_the_step_before() -> None:
    logged = Event(time_s=1.0, rank=0, kind="step", data={"step": 500, "loss": 2.5})
    between = Event(time_s=2.0, rank=0, kind="step", data={"step": 510})
    last = RunTotals.of([logged, between]).last_step
    assert last is not None and dict(last.data) == {"loss": 2.5, "step": 510}


def trained(folder: Path, factor: float = 1.0) -> WrittenRun:
    """Write a run that has ended, and whose events have numbers that the table does not know."""
    run = write_run(folder)
    for step in (1, 2, 3, 4):
        run.step(step, surprise=factor / step)
        if step % 2 == 0:
            evaluated = {"rougeL": factor * 3 * step / 16}
            run.event("eval", step=step, eval_loss=9.0 - step, metrics=evaluated)
    totals = RunTotals.of(read_events(run.paths.events))
    run.end(**totals.facts(None))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[WrittenRun]:
    return [trained(tmp_path / name, factor) for name, factor in (("a", 1.0), ("b", 2.0))]


def scalars(run: WrittenRun) -> dict[str, list[float]]:
    writer = ScalarWriter(run.paths.tensorboard)
    for event in read_events(run.paths.events):
        writer.add(event)
    writer.close()
    board = EventAccumulator(str(run.paths.tensorboard))
    board.Reload()
    tags = board.Tags()["scalars"]
    return {tag: [round(point.value, 4) for point in board.Scalars(tag)] for tag in tags}


def compared(runs: list[WrittenRun]) -> list[dict[str, str]]:
    grid = compare([run.paths.root for run in runs], names="ab").figures()
    return [dict(zip(grid.columns, map(str, row), strict=True)) for row in grid.rows]


def test_a_number_without_a_row_is_plotted_compared_and_sorted_by(
    runs: list[WrittenRun], tmp_path: Path
) -> None:
    run = Run.load(runs[0].paths.root)
    text = str(as_bundle(run.plot("surprise"))["text/plain"])
    assert "surprise: 1 at optimizer step 1, 0.25 at 4" in text
    text = str(as_bundle(run.plot("rougeL"))["text/plain"])
    assert "eval_rougeL: 0.375 at optimizer step 2, 0.75 at 4" in text

    written = scalars(runs[0])
    assert written["train/surprise"][-1] == 0.25 and written["eval/rougeL"] == [0.375, 0.75]

    assert [row["surprise"] for row in compared(runs)] == ["0.25", "0.5"]
    assert [row["rougeL"] for row in compared(runs)] == ["0.75", "1.5"]

    found = history(tmp_path, sort="-surprise")
    frame = found.to_dataframe()
    assert list(frame["step.surprise"]) == [0.5, 0.25]
    assert list(frame["metric.rougeL"]) == [1.5, 0.75]
    assert "surprise" in found.table().columns, "the column that sorts the table"
    assert "rougeL" not in found.table().columns
    for sort in ("rougeL", "eval_rougeL", "metric.rougeL"):
        (first, _) = history(tmp_path, sort=sort)
        assert first.metrics == {"rougeL": 0.75}
    assert dict(RunFacts(RunView(run.path)).figures)["surprise"] == "0.25"
    page = to_html(run_view_doc(RunView(run.path)))
    assert "surprise over optimizer steps" in page and "eval_rougeL over optimizer steps" in page
    assert "surprise 0.25" in str(run.result)


def test_an_unknown_number_is_refused_with_the_numbers_of_the_run(
    runs: list[WrittenRun], tmp_path: Path
) -> None:
    run = Run.load(runs[0].paths.root)
    with pytest.raises(ConfigError, match=r"did you mean 'surprise'\?.*loss.*memory.*eval_rougeL"):
        run.plot("surprize")
    with pytest.raises(ConfigError, match=r"did you mean 'step.surprise'\?.*eval_loss"):
        history(tmp_path, sort="step.surprize")


def test_a_row_alone_puts_a_metric_into_panel_plots_compare_and_history(
    runs: list[WrittenRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f} bits"

    surprise = Metric(
        name="surprise",
        title="surprise of the answers",
        unit="bits",
        better=Better.LESS,
        plot="surprise by step",
        write=write,
    )
    rouge = Metric(name="rougeL", event=EventKind.EVAL, title="ROUGE-L", write=write)
    before = run_view_doc(RunView(runs[0].paths.root))
    assert "surprise by step" not in to_html(before)
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, surprise, rouge))

    view = RunView(runs[0].paths.root)
    facts = dict(RunFacts(view).figures)
    assert facts["surprise of the answers"] == "0.250 bits"
    assert facts["ROUGE-L"] == "0.750 bits" and "rougeL" not in facts
    page = to_html(run_view_doc(view))
    assert "surprise by step over optimizer steps: bits by" in page
    assert "ROUGE-L over optimizer steps: ROUGE-L by" in page
    text = str(as_bundle(Run.load(view.paths.root).plot("rougeL"))["text/plain"])
    assert "ROUGE-L: 0.375 at optimizer step 2, 0.75 at 4" in text

    assert [row["surprise of the answers"] for row in compared(runs)] == [
        "0.250 bits",
        "0.500 bits",
    ]
    assert [row["ROUGE-L"] for row in compared(runs)] == ["0.750 bits", "1.500 bits"]
    grid = history(tmp_path, sort="surprise").table()
    assert {"surprise of the answers", "ROUGE-L"} < {*grid.columns}
    assert [row[list(grid.columns).index("ROUGE-L")] for row in grid.rows] == [
        "0.750 bits",
        "1.500 bits",
    ]
    assert scalars(runs[0])["eval/rougeL"] == [0.375, 0.75]
    assert less_is_better("surprise") and not less_is_better("rougeL")


def test_a_name_of_steps_and_evaluations_is_two_lines_and_two_columns(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in "ab"]
    for run in runs:
        for step in (1, 2):
            run.step(step, accuracy=step / 4, perplexity=100.0 * step)
            run.event("eval", step=step, eval_loss=2.0, perplexity=7.0, metrics={"accuracy": 0.5})
    plot = str(as_bundle(Run.load(runs[0].paths.root).plot("accuracy"))["text/plain"])
    assert "accuracy: 0.25 at optimizer step 1, 0.5 at 2" in plot
    assert "eval_accuracy: 0.5 at optimizer step 1, 0.5 at 2" in plot
    view = RunView(runs[0].paths.root, curves_of("train_perplexity"))
    assert list(view.curves["perplexity"]) == [(1, 7.0), (2, 7.0)]
    assert list(view.curves["train_perplexity"]) == [(1, 100.0), (2, 200.0)]
    board = scalars(runs[0])
    assert board["train/perplexity"] == [100.0, 200.0] and board["eval/perplexity"] == [7.0, 7.0]
    for run in runs:
        run.end(metrics={"accuracy": 0.5}, step_figures={"accuracy": 0.25})
    (row, _) = compared(runs)
    assert (row["accuracy"], row["training accuracy"]) == ("0.5", "0.25")


def test_last_values_are_finite_and_few(written: WrittenRun) -> None:
    written.step(1, surprise=1.0)
    written.step(2, surprise=math.nan)
    assert "surprise" not in RunTotals.of(read_events(written.paths.events)).step_figures
    names = {f"n{n}": 1.0 for n in range(1000)}
    totals = RunTotals.of([Event(time_s=0.0, rank=0, kind="step", data={"step": 1, **names})])
    assert len(totals.step_figures) == len(totals.curve_names) == 50
    written.step(3, **names)
    assert len(RunView(written.paths.root).curves) <= len(rows()) + 50


def test_a_result_without_figures_of_steps_opens(runs: list[WrittenRun]) -> None:
    path = runs[0].paths.result
    raw = json.loads(path.read_text())
    assert raw.pop("step_figures")["surprise"] == 0.25
    path.write_text(json.dumps(raw))
    assert record_of(runs[0].paths).step_figures == {}
    assert [row["surprise"] for row in compared(runs)] == ["–", "0.5"]


def test_names_and_directions_of_the_table() -> None:
    assert len({metric.name for metric in rows()}) == len(rows())
    assert all(metric.event in (EventKind.STEP, EventKind.EVAL) for metric in rows())
    assert [less_is_better(name) for name in ("eval_loss", "my_loss", "rougeL")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("loss", "value"), [(None, None), (0.0, 1.0), (699.0, math.exp(699.0)), (700.0, None)]
)
def test_perplexity_of_a_loss(loss: float | None, value: float | None) -> None:
    assert perplexity(loss) == value
