"""The plots of runs: curves over steps and over time, and the memory of pods."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.display.kit.plots.figure import STEP, Look, Plot, Series, look, time_axis
from workbench.rundir.events import EventKind
from workbench.rundir.metrics import curves_of, metric_of
from workbench.rundir.view import RunView

SINCE = "since the start was asked for"
_POINTS = 400
_LOSSES = ("loss", "eval_loss")


def plot_title(name: str) -> str:
    """Return the title of a metric's plot."""
    metric = metric_of(name)
    return metric.plot or metric.title


def curve_plot(view: RunView, name: str = "loss") -> Plot:
    """Return a curve over optimizer steps and over time.

    The plot of a step metric has the same metric of the evaluations too, as with the loss.
    """
    metric = metric_of(name)
    title = plot_title(name)
    unit = _loss_unit([view]) if name in _LOSSES else metric.unit or title
    lines = [
        (metric_of(curve).title, view, curve, look(place))
        for place, curve in enumerate(curves_of(name))
        if curve in view.curves
    ]
    return _plot(title, unit, lines)


def losses_plot(runs: Sequence[tuple[str, RunView]]) -> Plot:
    """Return the losses of several runs in a plot.

    Every run has its own look; evaluations are markers.
    """
    lines = [
        (f"{name}{words}", view, curve, look(place))
        for place, (name, view) in enumerate(runs)
        for curve, words in (("loss", ""), ("eval_loss", ", evaluation"))
    ]
    return _plot("loss of the runs", _loss_unit([view for _, view in runs]), lines)


def memory_plot(view: RunView) -> Plot:
    curves = [
        (view.pod_name(address), host.gib.thinned(_POINTS))
        for address, host in sorted(view.memory.items())
    ]
    times = [at for _, (ats, _, _) in curves for at in ats]
    began = min(times, default=0.0)
    ended = max(times, default=0.0)
    unit, per = time_axis(ended - began)
    axis = f"{unit} since the first sample"
    what = "GPU memory" if view.memory_kind == "cuda" else "resident memory"
    series = tuple(
        Series(name=name, xs={axis: [(at - began) / per for at in ats]}, ys=sizes, look=look(place))
        for place, (name, (ats, sizes, _)) in enumerate(curves)
    )
    return Plot(
        label=f"{what} per pod, GiB, over time",
        y="GiB",
        axes=(axis,),
        series=series,
        from_zero=True,
    )


def _plot(label: str, y: str, lines: Sequence[tuple[str, RunView, str, Look]]) -> Plot:
    ages = [view.curves[curve].last_time_s - (view.began_s or 0.0) for _, view, curve, _ in lines]
    unit, per = time_axis(max(filter(math.isfinite, ages), default=0.0))
    by_time = f"{unit} {SINCE}"
    series = []
    for name, view, curve, style in lines:
        steps, values, times = view.curves[curve].thinned(_POINTS)
        xs = {STEP: steps, by_time: [(at - (view.began_s or 0.0)) / per for at in times]}
        is_evaluation = metric_of(curve).event == EventKind.EVAL
        if values:
            series.append(Series(name=name, xs=xs, ys=values, look=style, joined=not is_evaluation))
    return Plot(label=f"{label} over optimizer steps", y=y, axes=(STEP, by_time), series=series)


def _loss_unit(views: Sequence[RunView]) -> str:
    """Name the unit of a loss, if the jobs of all runs name the same unit."""
    units = {view.spec.job.loss_unit if view.spec else "" for view in views}
    unit = units.pop() if len(units) == 1 else ""
    return f"loss, {unit}" if unit else "loss"
