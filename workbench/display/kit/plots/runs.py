"""The plots of runs: curves over steps and over time, and the memory of pods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.base.words import pluralize
from workbench.client.plot import AS_LOGGED, MEMORY, PlotOptions
from workbench.display.kit.plots.figure import (
    STEP,
    Look,
    Plot,
    Series,
    look,
    look_of_run,
    looks_of_runs,
    time_axis,
    with_marker,
)
from workbench.rundir.events import EventKind
from workbench.rundir.figures.curves import Curve
from workbench.rundir.figures.metrics import curves_of, metric_of
from workbench.rundir.view import RunView

SINCE = "since the start was asked for"
_POINTS = 400
_LOSSES = ("loss", "eval_loss")


def plot_title(name: str) -> str:
    """Return the title of a metric's plot."""
    metric = metric_of(name)
    return metric.plot or metric.title


def curve_plot(
    view: RunView,
    name: str = "loss",
    options: PlotOptions = AS_LOGGED,
) -> Plot:
    """Return a curve over optimizer steps and over time.

    The plot of a step metric has the same metric of the evaluations too, as with the loss. Every
    training of a run has a line of its own.
    """
    metric = metric_of(name)
    title = plot_title(name)
    unit = _loss_unit([view]) if name in _LOSSES else metric.unit or title
    lines = []
    for place, curve in enumerate(curves_of(name)):
        if curve not in view.curves:
            continue
        line_title = metric_of(curve).title
        weight = options.weight_of(curve)
        whole = _Line(line_title, view, curve, view.curves[curve], look(place), weight)
        for number, line in _trainings(whole):
            # The steps and the evaluations of a training have the same look.
            lines.append(line._replace(look=look(number - 1)) if number else line)
    return _plot(title, unit, lines, options)


def losses_plot(
    runs: Sequence[tuple[str, RunView]],
    options: PlotOptions = AS_LOGGED,
    *,
    distinct: bool = False,
) -> Plot:
    """Return the losses of several runs in a plot.

    Every run keeps its own look beside any other runs; evaluations are markers. Every training of a
    run has a line in the run's colour, with a marker of its own. `distinct`: a run whose colour an
    earlier one has gets a free colour.
    """
    ids = [view.id for _, view in runs]
    looks = looks_of_runs(ids) if distinct else [look_of_run(run_id) for run_id in ids]
    lines = []
    for (name, view), style in zip(runs, looks, strict=True):
        for curve, title in (("loss", name), ("eval_loss", f"{name}, evaluation")):
            weight = options.weight_of(name)
            whole = _Line(title, view, curve, view.curves[curve], style, weight)
            for number, line in _trainings(whole):
                lines.append(line._replace(look=with_marker(style, number - 1)) if number else line)
    unit = _loss_unit([view for _, view in runs])
    return _plot("loss of the runs", unit, lines, options)


def memory_plot(view: RunView, options: PlotOptions = AS_LOGGED) -> Plot:
    weight = options.weight_of(MEMORY)
    curves = []
    times: list[float] = []
    for address, host in sorted(view.memory.items()):
        ats, sizes, _ = host.gib.thinned(_POINTS)
        smoothed = host.gib.smoothed(weight, _POINTS) if weight else []
        curves.append((view.pod_name(address), ats, sizes, smoothed))
        times += ats
    # All pods share an axis of time, from the first sample of any pod.
    began = min(times, default=0.0)
    ended = max(times, default=0.0)
    unit, per = time_axis(ended - began)
    axis = f"{unit} since the first sample"
    what = "GPU memory" if view.memory_kind == "cuda" else "resident memory"
    series = []
    for place, (name, ats, sizes, smoothed) in enumerate(curves):
        one = Series(
            name=_line_name(name, weight),
            xs={axis: [(at - began) / per for at in ats]},
            ys=sizes,
            smoothed=smoothed,
            look=look(place),
        )
        series.append(one)
    return Plot(
        label=f"{what} per pod, GiB, over time",
        y="GiB",
        axes=(axis,),
        series=series,
        from_zero=not options.log,
        log=options.log,
        notes=_notes(series, options),
    )


class _Line(NamedTuple):
    name: str
    view: RunView
    metric: str
    curve: Curve
    look: Look
    weight: float
    """Weight of the smoothing; 0 draws the values as logged."""


def _trainings(last: _Line) -> Iterator[tuple[int, _Line]]:
    """Yield the line of every training with its number; 0 for the line of a single training."""
    earlier = last.curve.earlier
    if not earlier:
        yield 0, last
        return
    first = last.curve.begun - len(earlier)
    for number, curve in enumerate([*earlier, last.curve], first):
        yield number, last._replace(name=f"{last.name}, training {number}", curve=curve)


def _plot(
    label: str,
    y: str,
    lines: Sequence[_Line],
    options: PlotOptions,
) -> Plot:
    # The longest line decides the unit of time.
    ages_s = []
    for line in lines:
        age_s = line.curve.last_time_s - (line.view.began_s or 0.0)
        if math.isfinite(age_s):
            ages_s.append(age_s)
    unit, per = time_axis(max(ages_s, default=0.0))
    by_time = f"{unit} {SINCE}"
    series = []
    for line in lines:
        steps, values, times = line.curve.thinned(_POINTS, options.within)
        if not values:
            continue
        began_s = line.view.began_s or 0.0
        is_evaluation = metric_of(line.metric).event == EventKind.EVAL
        # Evaluations are markers: no line is smoothed.
        weight = 0.0 if is_evaluation else line.weight
        smoothed = line.curve.smoothed(weight, _POINTS, options.within) if weight else []
        one = Series(
            name=_line_name(line.name, weight),
            xs={
                STEP: steps,
                by_time: [(at - began_s) / per for at in times],
            },
            ys=values,
            smoothed=smoothed,
            look=line.look,
            joined=not is_evaluation,
        )
        series.append(one)
    is_by_time = options.x == "time"
    return Plot(
        label=f"{label} over {'time' if is_by_time else 'optimizer steps'}",
        y=y,
        axes=(by_time, STEP) if is_by_time else (STEP, by_time),
        series=series,
        log=options.log,
        notes=_notes(series, options),
    )


def _line_name(name: str, weight: float) -> str:
    return f"{name}, smoothed {weight:g}" if weight else name


def _notes(series: Sequence[Series], options: PlotOptions) -> list[str]:
    """Name what the plot does not show as logged."""
    notes = []
    if any(one.smoothed for one in series):
        notes.append("The pale lines are the logged values of smoothed lines.")
    if options.log:
        count = sum(y <= 0 for one in series for y in one.ys)
        if count:
            notes.append(f"Not drawn on the logarithmic axis: {pluralize(count, 'value')} up to 0.")
    return notes


def _loss_unit(views: Sequence[RunView]) -> str:
    """Name the unit of a loss, if the jobs of all runs name the same unit."""
    units = {view.spec.job.views.loss_unit if view.spec else "" for view in views}
    unit = units.pop() if len(units) == 1 else ""
    return f"loss, {unit}" if unit else "loss"
