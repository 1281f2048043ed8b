"""Figures of lm-eval before and after training, as a table."""

from __future__ import annotations

from workbench.base.table import Cell, Grid, Toned
from workbench.base.words import UNKNOWN, count, number, strip_controls
from workbench.display.kit.doc import Doc, Note, Table
from workbench.finetune.lm_eval.scores import Score, Scores

_DIRECTIONS = {"greater": "↑ higher is better", "less": "↓ lower is better"}


def scores_doc(scores: Scores) -> Doc:
    note = strip_controls(f"lm-eval {scores.lm_eval}, evaluated by run {scores.run_id}")
    return Doc(blocks=[Table(scores_grid(scores)), Note(note)])


def scores_grid(scores: Scores, _: int | None = None) -> Grid:
    columns = ("task", "metric", "base", "trained", "difference", "rows")
    return Grid(
        columns=columns,
        rows=[_row(score) for score in scores],
        right=columns[2:],
        whole=("task", "metric"),
        caption="Benchmarks before and after training",
    )


def _row(score: Score) -> tuple[Cell, ...]:
    difference = UNKNOWN
    if score.difference is not None:
        sign = "+" if score.difference > 0 else ""
        difference = f"{sign}{number(score.difference)}"
    return (
        score.task,
        Toned(score.metric, beneath=_DIRECTIONS.get(score.better, "")),
        _with_error(score.base, score.base_stderr),
        _with_error(score.trained, score.stderr),
        difference,
        count(score.rows),
    )


def _with_error(value: float | None, stderr: float | None) -> str:
    """Return a figure with its standard error."""
    return number(value) if stderr is None else f"{number(value)} ± {number(stderr)}"
