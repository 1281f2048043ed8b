"""`Scores`: figures of lm-eval before and after training, read from run directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from workbench.base.display_protocol import Displayable
from workbench.base.json_values import Json, as_float, as_int, as_objects, as_str, get_object
from workbench.base.table import Grid, as_grid, data_frame
from workbench.base.words import pluralize
from workbench.rundir.catalog.benchmarks import evaluations_of
from workbench.rundir.figures.metric import Better
from workbench.rundir.paths import RunPaths

if TYPE_CHECKING:
    from pandas import DataFrame

_STDERR = "_stderr"


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A figure of lm-eval for a task."""

    task: str
    metric: str
    """Name in lm-eval, with the filter of the answers if the task has one: `exact_match,strict`."""
    name: str
    """Name in `history` and `compare`: task, metric, and the options that change the figure."""
    base: float | None
    """Figure before training. None: the base was not evaluated."""
    trained: float
    """Figure after training."""
    base_stderr: float | None
    """Standard error of the figure before training. None: unknown."""
    stderr: float | None
    """Standard error of the figure after training. None: unknown."""
    better: str
    """Better direction, a value of `Better`: greater, less, or empty if unknown."""
    rows: int | None
    """Number of rows. None: a group of tasks."""

    @property
    def difference(self) -> float | None:
        """The figure after training minus the figure before. None: no figure before."""
        return None if self.base is None else self.trained - self.base


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores(Displayable):
    """Figures of a run's model by lm-eval. Prints, and shows in a notebook, as a table."""

    scores: tuple[Score, ...]
    run_id: str
    """Id of the run that evaluated the model."""
    lm_eval: str
    """Version of lm-eval on the pods."""

    def table(self) -> Grid:
        """Return the table, to print or to show."""
        return as_grid(self)

    def to_dataframe(self) -> DataFrame:
        """Return the figures as a pandas DataFrame, a row per task and metric."""
        names = [field.name for field in fields(Score)]
        rows = [{**asdict(score), "difference": score.difference} for score in self.scores]
        return data_frame(rows, [*names, "difference"])

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Score]:
        return iter(self.scores)

    def __repr__(self) -> str:
        tasks = {score.task for score in self.scores}
        return f"Scores({pluralize(len(tasks), 'task')}, lm-eval {self.lm_eval})"


def scores_from(raw: Json, options: Mapping[str, object]) -> list[Score]:
    """Return the figures in the file of an evaluation.

    Args:
        raw: Results of lm-eval for `trained`, and perhaps for `base`.
        options: Options that change figures: `limit`, `num_fewshot` and `apply_chat_template`.
    """
    trained = get_object(raw, "trained")
    base = get_object(get_object(raw, "base"), "results")
    found = []
    results = get_object(trained, "results")
    for task in results:
        figures = get_object(results, task)
        before = get_object(base, task)
        directions = get_object(get_object(trained, "higher_is_better"), task)
        rows = as_int(get_object(get_object(trained, "n-samples"), task).get("effective"))
        # A key has the metric and its filter, as in `exact_match,strict-match`.
        for key in figures:
            metric, _, kept = key.partition(",")
            value = as_float(figures[key])
            if value is None or metric.endswith(_STDERR) or not kept:
                continue
            stderr = f"{metric}{_STDERR},{kept}"
            title = metric if kept == "none" else f"{metric},{kept}"
            score = Score(
                task=task,
                metric=title,
                name=", ".join([f"{task} {title}", *_changes(options)]),
                base=as_float(before.get(key)),
                trained=value,
                base_stderr=as_float(before.get(stderr)),
                stderr=as_float(figures.get(stderr)),
                better=_better(directions.get(metric)),
                rows=rows,
            )
            found.append(score)
    return found


def read_scores(paths: RunPaths) -> tuple[Scores, ...]:
    """Return the evaluations in a run directory, the newest last."""
    return tuple(_scores(each) for each in evaluations_of(paths))


def as_evaluation(scores: Scores) -> Mapping[str, Any]:
    """Return the entry of an evaluation for `rundir/catalog/benchmarks.py`."""
    return asdict(scores)


def _scores(evaluation: Mapping[str, Any]) -> Scores:
    scores = []
    for raw in as_objects(evaluation.get("scores")):
        score = Score(
            task=as_str(raw.get("task")),
            metric=as_str(raw.get("metric")),
            name=as_str(raw.get("name")),
            base=as_float(raw.get("base")),
            trained=as_float(raw.get("trained")) or 0.0,
            base_stderr=as_float(raw.get("base_stderr")),
            stderr=as_float(raw.get("stderr")),
            better=as_str(raw.get("better")),
            rows=as_int(raw.get("rows")),
        )
        scores.append(score)
    return Scores(
        scores=tuple(scores),
        run_id=as_str(evaluation.get("run_id")),
        lm_eval=as_str(evaluation.get("lm_eval")),
    )


def _changes(options: Mapping[str, object]) -> list[str]:
    """Return the options without which a figure would be another."""
    changes = [
        f"{name}={options[name]}"
        for name in ("num_fewshot", "limit")
        if options.get(name) is not None
    ]
    return [*changes, "apply_chat_template"] if options.get("apply_chat_template") else changes


def _better(higher: object) -> str:
    if higher is None:
        return Better.NONE.value
    return Better.GREATER.value if higher else Better.LESS.value
