"""Losses of a benchmark's rows against steps and against seconds. A long curve is drawn as means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.words import counted
from workbench.benchmark.report import LossPoint
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.plots.figure import DASHES, STEP, Plot, Series, equal_series, look, time_axis
from workbench.display.kit.plots.runs import SINCE
from workbench.display.kit.plots.static import look_of, plot_svg

_SIZE_IN = (5.6, 2.9)
_PLACE = (0.11, 0.155, 0.535, 0.81)
_MOST_LINES = 8
_POINTS = 40  # a longer curve is drawn as so many means


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPlot:
    title: str
    lines: tuple[Line, ...]
    plot: Plot
    by_step: str
    """The `<svg>` against steps; empty where all lines are the same."""
    by_second: str
    """The `<svg>` against seconds since the start was asked for."""


def loss_plots(sheet: Sheet, losses: Mapping[int, Sequence[LossPoint]]) -> list[LossPlot]:
    """Draw training losses, at most eight rows a plot: a part of the table at once, or by its numbers of pods."""
    plots = []
    for part in sheet.parts:
        lines = [line for line in part.lines if line.number in losses and len(losses[line.number]) > 1]
        for pods, chosen in _portions(lines):
            title = ", ".join(filter(None, (chosen[0].model, pods, "" if part is sheet.parts[0] else part.heading)))
            plots.append(_loss_plot(title, chosen, losses))
    return plots


def _portions(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    if len(lines) <= _MOST_LINES:
        return [("", list(lines))] if lines else []
    by_pods: dict[int, list[Line]] = {}
    for line in lines:
        by_pods.setdefault(line.row.pods, []).append(line)
    return [
        (counted(pods, "pod"), group[first : first + _MOST_LINES])
        for pods, group in sorted(by_pods.items())
        for first in range(0, len(group), _MOST_LINES)
    ]


def _loss_plot(title: str, lines: Sequence[Line], losses: Mapping[int, Sequence[LossPoint]]) -> LossPlot:
    widest = max(-(-len(losses[line.number]) // _POINTS) for line in lines)
    means = [(line, _means(losses[line.number], widest)) for line in lines]
    unit, per = time_axis(max(points[-1].seconds for _, points in means))
    by_time = f"{unit} {SINCE}"
    by_technique = len({line.technique for line in lines}) > 1
    pods = sorted({line.row.pods for line in lines})
    series = [
        Series(
            name=line.label,
            xs={STEP: [point.step for point in points], by_time: [point.seconds / per for point in points]},
            ys=[point.loss for point in points],
            look=look_of(line.technique, DASHES[pods.index(line.row.pods) % len(DASHES)]) if by_technique else look(n),
        )
        for n, (line, points) in enumerate(means)
    ]
    # Of techniques that do the same work the lines lie on each other: one is drawn, and the rest is said.
    groups = equal_series(series, STEP)
    notes = [f"Each point is the mean of {widest} logged steps."] if widest > 1 else []
    notes += [
        f"Over steps the losses of rows {', '.join(str(lines[n].number) for n in group)} are the same line."
        for group in groups
        if len(group) > 1
    ]
    all_equal = len(groups) == 1 < len(series)
    plot = Plot(
        label=f"training loss, {title}", y="training loss, nats per token",
        axes=(STEP, by_time) if 2 * len(groups) > len(series) else (by_time, STEP), series=series, notes=notes,
    )  # fmt: skip
    others = [", ".join(str(lines[n].number) for n in group[1:]) for group in groups]
    drawn = [
        replace(series[group[0]], end=f"= {rest}" if rest else "") for group, rest in zip(groups, others, strict=True)
    ]
    apart = replace(plot, series=drawn)
    return LossPlot(
        title=title, lines=tuple(lines), plot=plot, by_step="" if all_equal else _svg(apart, STEP),
        by_second=_svg(plot, by_time),
    )  # fmt: skip


def _svg(plot: Plot, axis: str) -> str:
    return plot_svg(plot, axis, size_in=_SIZE_IN, place=_PLACE, columns=0)


def _means(points: Sequence[LossPoint], width: int) -> list[LossPoint]:
    """Return the mean of every so many points, at the place of the last of them."""
    pieces = [points[first : first + width] for first in range(0, len(points), width)]
    return [LossPoint(p[-1].step, p[-1].seconds, sum(point.loss for point in p) / len(p)) for p in pieces]
