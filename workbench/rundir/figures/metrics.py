"""Known metrics of a run, and the numbers of events that have no row in the table.

Panel, plots, TensorBoard, `history` and `compare` read the table. A row is all that a new metric
needs there. A kind of job brings the rows of its own metrics. A number of a step or an evaluation
without a row has a curve, a tag in TensorBoard, a column of `compare` and of the data frames, and a
folded plot at the end of the panel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.json_values import numbers_of
from workbench.base.words import rate, strip_controls
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.metric import Better, Metric, Write
from workbench.rundir.figures.reported import metrics_of_kinds

_EVALUATION = "eval_"
# Numbers of an event that count the steps or describe the event.
_NO_METRICS = frozenset(("step", "max_steps", "epoch", "profiled", "train_samples_per_s"))


LOSSES: tuple[Metric, ...] = (
    Metric(
        name="loss",
        title="training loss",
        unit="loss",
        better=Better.LESS,
        plot="loss",
        in_tables=False,
    ),
    Metric(
        name="eval_loss",
        event=EventKind.EVAL,
        title="evaluation loss",
        unit="loss",
        better=Better.LESS,
        # The plot of the training loss has the evaluation loss as markers.
        in_panel=False,
        in_tables=False,
    ),
)
METRICS: tuple[Metric, ...] = (
    Metric(
        name="learning_rate",
        title="learning rate",
        unit="learning rate, per step",
        write=rate,
        in_tables=False,
        aliases=("lr",),
    ),
    Metric(
        name="grad_norm",
        title="gradient norm",
        unit="L2 norm",
        in_tables=False,
    ),
    Metric(
        name="samples_per_s",
        title="samples/s",
        better=Better.GREATER,
        plot="samples per second",
        in_tables=False,
    ),
)
"""Metrics of a job of any kind. A kind adds its own metrics by `Reported.metrics`."""


def rows() -> tuple[Metric, ...]:
    """Return all rows in the order of the panel: losses, metrics of the kinds, other metrics."""
    return (*LOSSES, *metrics_of_kinds(), *METRICS)


def known(name: str) -> Metric | None:
    """Return the row of a metric. None: the table has no such row."""
    for metrics in (LOSSES, METRICS, metrics_of_kinds()):
        for metric in metrics:
            if metric.name == name:
                return metric
    return None


def metric_of(name: str) -> Metric:
    """Return the row of a metric, or a row with the name as the title.

    Example:
        >>> metric_of("grad_norm").title
        'gradient norm'
        >>> metric_of("eval_rougeL").title, metric_of("eval_rougeL").event
        ('eval_rougeL', <EventKind.EVAL: 'eval'>)
    """
    row = known(name)
    if row is not None:
        return row
    event = EventKind.EVAL if name.startswith(_EVALUATION) else EventKind.STEP
    return Metric(name=name, event=event, title=name, in_panel=False)


def plot_names() -> list[str]:
    """Return the names of the plots that the panel draws for every run, the loss first."""
    return [metric.name for metric in rows() if metric.in_panel]


def curves_of(name: str) -> list[str]:
    """Return the names of the curves in a plot: the metric, and the same of the evaluations.

    Example:
        >>> curves_of("loss"), curves_of("rougeL"), curves_of("eval_loss")
        (['loss', 'eval_loss'], ['rougeL', 'eval_rougeL'], ['eval_loss'])
    """
    if metric_of(name).event == EventKind.EVAL:
        return [name]
    return [name, _EVALUATION + name]


def numbers_in(event: Event) -> dict[str, float]:
    """Return the numbers of a step or an evaluation by their names in the event.

    Counts of steps and epochs are left out. Numbers may not be finite.
    """
    numbers: dict[str, float] = {}
    if event.kind not in (EventKind.STEP, EventKind.EVAL):
        return numbers
    if event.kind == EventKind.EVAL:
        numbers |= numbers_of(event.data.get("metrics"))
    # The event's own numbers replace metrics of the same name.
    for name in event.data:
        value = None if name in _NO_METRICS else event.number(name)
        if value is not None:
            numbers[name] = value
    return numbers


def figures_of(event: Event) -> dict[str, float]:
    """Return the numbers of a step or an evaluation by the names of their curves.

    Example:
        >>> figures = {"eval_loss": 2.5, "metrics": {"rouge1": 0.5}, "step": 3}
        >>> figures_of(Event(time_s=0, rank=0, kind="eval", data=figures))
        {'eval_rouge1': 0.5, 'eval_loss': 2.5}
    """
    return {curve_name(name, event.kind): value for name, value in numbers_in(event).items()}


def curve_name(name: str, kind: str) -> str:
    """Return the name of the curve for a number of a step or an evaluation.

    A number of an evaluation without a row begins with `eval_`. A number of a step begins with
    `train_` if the table has an evaluation of the name.

    Example:
        >>> curve_name("rougeL", "eval"), curve_name("eval_loss", "eval")
        ('eval_rougeL', 'eval_loss')
        >>> curve_name("rougeL", "step"), curve_name("eval_loss", "step")
        ('rougeL', 'train_eval_loss')
    """
    row = known(name)
    is_evaluated = row is not None and row.event == EventKind.EVAL
    if kind == EventKind.EVAL:
        return name if is_evaluated or name.startswith(_EVALUATION) else _EVALUATION + name
    return f"train_{name}" if is_evaluated else name


def tag_of(name: str, kind: str) -> str:
    """Return the TensorBoard tag for a number of a step or an evaluation.

    Example:
        >>> tag_of("loss", "step"), tag_of("eval_loss", "eval"), tag_of("rougeL", "eval")
        ('train/loss', 'eval/loss', 'eval/rougeL')
    """
    if kind == EventKind.EVAL:
        return "eval/" + name.removeprefix(_EVALUATION)
    return "train/" + name


def scalar_names() -> dict[str, str]:
    """Return the step metrics by their names among the scalars of a script's TensorBoard files."""
    names = {}
    for metric in rows():
        if metric.event == EventKind.STEP:
            for name in (metric.name, *metric.aliases):
                names[name] = metric.name
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Last values of a metric in several runs, besides the fields of the result."""

    key: str
    """Name in data frames: `metric.NAME` for a number of evaluations, `step.NAME` for steps."""
    title: str
    write: Write
    in_tables: bool
    """Whether `compare` shows the column."""
    is_known: bool
    """Whether the metric has a row. The table of `history` has no room for others."""
    values: Sequence[float | None]
    """A value per run. None: the run has not reported the metric."""


def columns_of(
    evaluations: Sequence[Mapping[str, float]], steps: Sequence[Mapping[str, float]]
) -> list[Column]:
    """Return the columns for the last numbers of evaluations and of steps, a mapping per run.

    Example:
        >>> columns = columns_of([{"rougeL": 0.5}], [{"grad_norm": 2.0, "rougeL": 0.25}])
        >>> [(column.key, column.title) for column in columns if column.in_tables]
        [('metric.rougeL', 'rougeL'), ('step.rougeL', 'training rougeL')]
    """
    columns = []
    for name in _names_in(evaluations):
        values = [each.get(name) for each in evaluations]
        columns.append(_column(EventKind.EVAL, name, values))
    titles = {column.title for column in columns}
    for name in _names_in(steps):
        values = [each.get(name) for each in steps]
        column = _column(EventKind.STEP, name, values)
        if column.title in titles:
            column = replace(column, title=f"training {column.title}")
        columns.append(column)
    return columns


def less_is_better(name: str) -> bool:
    """Return whether a smaller value is better, by the table or by a name that ends in `loss`."""
    row = known(name)
    if row is not None:
        return row.better is Better.LESS
    return name.endswith("loss")


def _names_in(several: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for each in several for name in each))


def _column(event: EventKind, name: str, values: Sequence[float | None]) -> Column:
    row = known(name)
    if row is None or row.event != event:
        row = Metric(name=name, event=event, title=name)
    is_evaluation = event == EventKind.EVAL
    return Column(
        key=f"metric.{name}" if is_evaluation else f"step.{name}",
        title=strip_controls(row.title),
        write=row.write,
        # No other column has the numbers of an evaluation.
        in_tables=row.in_tables or is_evaluation,
        is_known=row is known(name),
        values=values,
    )
