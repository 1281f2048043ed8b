"""Figures of evaluations that arrive in parts, and trainings that begin again."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.sentences import says
from tests.support.writtenrun import write_run
from workbench.base.process import RUN_MARK
from workbench.client.tables.comparison import compare
from workbench.display.kit.plots.figure import look_of_run
from workbench.display.kit.plots.runs import curve_plot, losses_plot
from workbench.rundir import events as events_module
from workbench.rundir.events import Event, log
from workbench.rundir.figures.curves import Curve, ScalarWriter
from workbench.rundir.totals import RunTotals
from workbench.rundir.view import RunView

NAMES = ["eval_loss", "accuracy", "news_loss", "code_loss", "准确率"]


def evaluation(step: int, figures: dict[str, float]) -> Event:
    metrics = {name: value for name, value in figures.items() if name != "eval_loss"}
    data: dict[str, object] = {"step": step, "metrics": metrics}
    data["eval_loss"] = figures.get("eval_loss")
    return Event(time_s=step, rank=0, kind="eval", data=data)


def trained(step: int, **figures: float) -> Event:
    return Event(time_s=step, rank=0, kind="step", data={"step": step, **figures})


def facts(*events: Event) -> dict[str, object]:
    found = RunTotals.of(events).facts(0.0)
    return {name: found.get(name) for name in ("eval_loss", "eval_step", "metrics")}


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(-9, 9), min_size=1),
    st.lists(st.integers(0, 4), min_size=5, max_size=5),
    st.permutations(range(5)),
)
def test_any_split_of_an_evaluation_gives_the_same_figures(
    figures: dict[str, float], places: list[int], order: list[int]
) -> None:
    earlier = evaluation(2, dict.fromkeys(figures, 9.5))
    parts: list[dict[str, float]] = [{} for _ in range(5)]
    for place, (name, value) in zip(places, figures.items(), strict=False):
        parts[place][name] = value
    split = [evaluation(4, parts[place]) for place in order if parts[place]]
    whole = facts(earlier, evaluation(4, figures))
    assert facts(earlier, *split) == whole
    totals = RunTotals.of([earlier, *split])
    assert {"eval_loss": totals.eval_loss, **totals.metrics} == {"eval_loss": None, **figures}


def test_a_test_set_at_the_end_erases_no_figure() -> None:
    on_the_way = evaluation(8, {"eval_loss": 0.5, "accuracy": 0.25})
    at_end = evaluation(10, {"test_loss": 3.0})
    assert facts(on_the_way, at_end) == {
        "eval_loss": 0.5,
        "eval_step": 8,
        "metrics": {"accuracy": 0.25, "test_loss": 3.0},
    }


def test_an_evaluation_of_the_untrained_model_is_no_result() -> None:
    first = evaluation(0, {"eval_loss": 4.0, "accuracy": 0.1})
    assert facts(first) == {"eval_loss": None, "eval_step": None, "metrics": None}
    then = facts(first, evaluation(2, {"accuracy": 0.5}))
    assert then == {"eval_loss": None, "eval_step": 2, "metrics": {"accuracy": 0.5}}


def test_a_figure_that_is_not_finite_leaves_no_older_one() -> None:
    before = evaluation(2, {"eval_loss": 1.0, "f1": 0.5})
    after = evaluation(4, {"eval_loss": math.inf, "f1": math.nan})
    assert facts(before, after) == {"eval_loss": math.inf, "eval_step": 4, "metrics": None}


def test_names_stay_bounded_and_the_last_ones_are_kept() -> None:
    totals = RunTotals.of([evaluation(n, {f"f{n}": n}) for n in range(1, 60)])
    assert list(totals.metrics) == [f"f{n}" for n in range(10, 60)]


@pytest.mark.parametrize("parts", [*permutations(("max_steps", "loss", "grad_norm"))])
def test_any_split_of_a_step_gives_the_same_figures(parts: tuple[str, ...]) -> None:
    figures = {"max_steps": 9, "loss": 0.5, "grad_norm": 2.0}
    events = [trained(3, **{name: figures[name]}) for name in parts]
    totals = RunTotals.of([trained(1, loss=4.0), *events])
    assert totals.last_step is not None
    assert totals.last_step.data == {"step": 3, **figures}


def curve_of(events: list[Event]) -> list[tuple[float, float]]:
    curve = Curve()
    for event in events:
        curve.follow(event.whole("step"), event.number("loss"), event.time_s, late=False)
    return list(curve)


def test_a_cross_validation_is_said_and_its_line_does_not_run_back() -> None:
    folds = [
        [trained(step, loss=fold + 1 / step) for step in range(1, 6 - fold)] for fold in (0, 1, 2)
    ]
    totals = RunTotals.of([event for fold in folds for event in fold])
    assert says(totals.notes, "and the figures are those of the last training", 1, "twice")
    assert totals.facts(0.0)["steps"] == 3
    assert curve_of([event for fold in folds for event in fold]) == curve_of(folds[2])


FOLDS = [
    [
        evaluation(0, {"eval_loss": 9.0 + fold}),
        *(trained(step, loss=fold + 1 / step) for step in range(1, last + 1)),
        evaluation(last, {"eval_loss": fold + 0.5, "accuracy": 0.25 * fold}),
    ]
    for fold, last in enumerate((3, 5, 5, 2))
]


def viewed(folder: Path, events: list[Event]) -> RunView:
    written = write_run(folder)
    written.paths.events.write_text("".join(f"{event.to_json()}\n" for event in events))
    return RunView(written.paths.root)


@pytest.mark.parametrize("is_evaluated_first", [True, False])
def test_every_training_of_a_run_has_a_line_in_the_plots(
    tmp_path: Path, is_evaluated_first: bool
) -> None:
    folds = FOLDS if is_evaluated_first else [fold[1:] for fold in FOLDS]
    view = viewed(tmp_path / "all", [event for fold in folds for event in fold])
    for name in ("loss", "eval_loss", "accuracy"):
        drawn = [
            (one.name, [*one.xs["optimizer step"]], [*one.ys])
            for one in curve_plot(view, name).series
        ]
        expected = []
        for number, fold in enumerate(folds, 1):
            alone = viewed(tmp_path / f"{name}-{number}", fold)
            for one in curve_plot(alone, name).series:
                title = f"{one.name}, training {number}"
                expected.append((title, [*one.xs["optimizer step"]], [*one.ys]))
        assert sorted(drawn) == sorted(expected)
    looks = {one.name[-1]: one.look for one in curve_plot(view).series}
    assert len(set(looks.values())) == len(folds)


def test_a_restart_repeats_the_trainings_and_adds_no_line(tmp_path: Path) -> None:
    again = Event(time_s=9, rank=None, kind="restarted", data={"step": None, "lost_s": 8.0})
    first = [event for fold in FOLDS[:2] for event in fold]
    every = [event for fold in FOLDS for event in fold]
    restarted = curve_plot(viewed(tmp_path / "restarted", [*first, again, *every]))
    alone = curve_plot(viewed(tmp_path / "alone", every))
    assert [(one.name, list(one.ys)) for one in restarted.series] == [
        (one.name, list(one.ys)) for one in alone.series
    ]


@pytest.mark.parametrize("is_evaluated_first", [True, False])
def test_a_comparison_draws_every_training_of_each_run_as_its_own_panel(
    tmp_path: Path, is_evaluated_first: bool
) -> None:
    folds = FOLDS if is_evaluated_first else [fold[1:] for fold in FOLDS]
    several = viewed(tmp_path / "several", [event for fold in folds for event in fold])
    single = viewed(tmp_path / "single", folds[0])
    both = compare([several.paths.root, single.paths.root], names=["a", "b"])
    plot = losses_plot([(run.name, run.view) for run in both.runs])
    for name, view in (("a", several), ("b", single)):
        titles = {"training loss": name, "evaluation loss": f"{name}, evaluation"}
        panel = []
        for one in curve_plot(view).series:
            curve, _, training = one.name.partition(",")
            title = titles[curve] + (training and f",{training}")
            panel.append((title, [*one.xs["optimizer step"]], [*one.ys]))
        own = [one for one in plot.series if one.name.startswith(name)]
        drawn = [(one.name, [*one.xs["optimizer step"]], [*one.ys]) for one in own]
        assert sorted(drawn) == sorted(panel)
        assert {one.look.colour for one in own} == {look_of_run(view.id).colour}
        trainings = {one.name.rpartition("training ")[2] for one in own if "training " in one.name}
        assert len({one.look.marker for one in own}) == max(1, len(trainings))
    assert "a, training 2: " in str(both), "the text names what the picture shows"


def test_a_run_of_very_many_trainings_keeps_the_last_lines(tmp_path: Path) -> None:
    steps = [trained(step, loss=1.0 * fold) for fold in range(60) for step in (1, 2)]
    names = [one.name for one in curve_plot(viewed(tmp_path / "all", steps)).series]
    assert names == [f"training loss, training {number}" for number in range(41, 61)]


def test_counters_of_their_own_and_late_reports_are_no_new_training() -> None:
    two = [
        trained(step, **{name: 1.0})
        for n in range(1, 9)
        for step, name in ((n, "d_loss"), (n // 2 + 1, "g_loss"))
    ]
    assert RunTotals.of(two).notes == []
    disorder = [trained(step, loss=1.0 * step) for step in (1, 2, 4, 3, 5)]
    assert RunTotals.of(disorder).notes == []
    assert [x for x, _ in curve_of(disorder)] == [1, 2, 3, 4, 5]


def test_steps_of_another_rank_that_come_late_are_no_new_training() -> None:
    first = [trained(step, loss=1.0) for step in range(1, 6)]
    other = [Event(time_s=each.time_s, rank=1, kind="step", data=each.data) for each in first]
    assert RunTotals.of([*first, *other]).notes == []


def test_a_restart_is_no_new_training() -> None:
    again = Event(time_s=9, rank=None, kind="restarted", data={"step": None, "lost_s": 8.0})
    steps = [trained(step, loss=1.0) for step in (1, 2, 3)]
    assert RunTotals.of([*steps, again, *steps]).notes == []


def test_a_log_within_a_job_of_the_product_replaces_none_of_its_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Event] = []

    def emit(kind: str, **data: object) -> None:
        told.append(Event(time_s=1, rank=0, kind=kind, data=data))

    monkeypatch.setenv(RUN_MARK, "r")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(events_module, "emit", emit)
    own = [trained(4, loss=3.0), evaluation(4, {"eval_loss": 2.0, "accuracy": 0.5})]
    monkeypatch.setattr(events_module, "_product_names", {"loss", "eval_loss", "accuracy"})
    log(4, loss=0.0, eval_loss=0.0, eval_accuracy=0.0, accuracy=0.25, f1=0.75)
    totals = RunTotals.of([*own, *told])
    assert (totals.eval_loss, totals.metrics["accuracy"]) == (2.0, 0.5)
    assert totals.metrics == {"accuracy": 0.5, "log.loss": 0.0, "log.accuracy": 0.0}
    assert totals.step_figures == {"loss": 3.0, "log.loss": 0.0, "log.accuracy": 0.25, "f1": 0.75}


LATER = [Event(time_s=9, rank=1, kind="memory", data={"step": 2, "rss_gib": 0.5})]


def board_of(folder: Path, events: list[Event]) -> dict[str, list[tuple[int, float]]]:
    """Return the points that TensorBoard reads, by tag."""
    writer = ScalarWriter(folder)
    for event in events:
        writer.add(event)
    writer.close()
    board = EventAccumulator(str(folder))
    board.Reload()
    return {
        tag: [(point.step, round(point.value, 4)) for point in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
    }


def test_tensorboard_reads_every_point_of_a_restarted_run_once(tmp_path: Path) -> None:
    def steps(first: int, last: int) -> list[Event]:
        return [trained(step, loss=float(step)) for step in range(first, last + 1)]

    def back(step: int | None) -> Event:
        return Event(time_s=9, rank=None, kind="restarted", data={"step": step, "lost_s": 8.0})

    alone = board_of(tmp_path / "alone", [*steps(1, 5), *LATER])
    assert [step for step, _ in alone["train/loss"]] == [1, 2, 3, 4, 5]
    again = [*steps(1, 4), back(None), *steps(1, 5), *LATER]
    assert board_of(tmp_path / "again", again) == alone
    resumed = [*steps(1, 4), back(3), *steps(4, 5), *LATER]
    assert board_of(tmp_path / "resumed", resumed) == alone
    assert board_of(tmp_path / "unstarted", [back(None), *steps(1, 5), *LATER]) == alone
