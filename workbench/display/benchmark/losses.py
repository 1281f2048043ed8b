"""Losses of a benchmark's rows against steps and against seconds, as static SVG. A long curve is drawn as means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.words import counted
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.labels import MARKERS, LineLabel, look_of, write_labels
from workbench.display.kit.plots import COLOURS, dress_axes, figure_svg
from workbench.results.losses import Losses, LossPoint

__all__ = ["LossPlot", "loss_plots"]

_SIZE_IN = (5.6, 2.9)
_MOST_LINES = 8
_POINTS = 40  # a longer curve is drawn as so many means
_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPlot:
    """One plot of losses."""

    title: str
    lines: tuple[Line, ...]
    by_step: str
    by_second: str
    """The `<svg>` against seconds since the start was asked for."""
    note: str
    """How many steps a point is the mean of, where it is of several; else empty."""


def loss_plots(sheet: Sheet, losses: Mapping[int, Losses]) -> list[LossPlot]:
    """Draw training losses, at most eight rows a plot: a part of the table at once, or by its numbers of pods."""
    plots = []
    for part in sheet.parts:
        lines = [line for line in part.lines if line.number in losses and len(losses[line.number].train) > 1]
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


def _loss_plot(title: str, lines: Sequence[Line], losses: Mapping[int, Losses]) -> LossPlot:
    widest = max(-(-len(losses[line.number].train) // _POINTS) for line in lines)
    means = [(line, _means(losses[line.number].train, widest)) for line in lines]
    note = f"Each point is the mean of {widest} logged steps." if widest > 1 else ""
    drawn = [
        _losses_svg(title, means, of=of, xlabel=xlabel)
        for of, xlabel in (("step", "optimizer step"), ("seconds", "seconds since the start was asked for"))
    ]
    return LossPlot(title=title, lines=tuple(lines), by_step=drawn[0], by_second=drawn[1], note=note)


def _means(points: Sequence[LossPoint], width: int) -> list[LossPoint]:
    """Return the mean of every so many points, at the place of the last of them."""
    pieces = [points[first : first + width] for first in range(0, len(points), width)]
    return [LossPoint(p[-1].step, p[-1].seconds, sum(point.loss for point in p) / len(p)) for p in pieces]


def _losses_svg(title: str, means: Sequence[tuple[Line, Sequence[LossPoint]]], *, of: str, xlabel: str) -> str:
    by_technique = len({line.technique for line, _ in means}) > 1
    styles = sorted({line.row.pods for line, _ in means})
    values = [point.loss for _, points in means for point in points]
    low, high = min(values), max(values)
    bottom, top = low - 0.08 * (high - low or 1), high + 0.05 * (high - low or 1)

    def draw(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        labels = []
        for number, (line, points) in enumerate(means):
            colour, marker = look_of(line.technique) if by_technique else (COLOURS[number], MARKERS[number])
            style = _STYLES[styles.index(line.row.pods) % len(_STYLES)] if by_technique else "-"
            xs, ys = [getattr(point, of) for point in points], [point.loss for point in points]
            axes.plot(
                xs, ys, color=colour, linewidth=1.4, marker=marker, markersize=3, markevery=max(1, len(xs) // 6),
                linestyle=style,
            )  # fmt: skip
            labels.append(LineLabel(x=xs[-1], y=ys[-1], text=line.label, colour=colour, marker=marker, dashes=style))
        axes.set_ylim(bottom, top)
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=of == "step"))
        dress_axes(axes, xlabel, "training loss")
        write_labels(axes, labels, top, bottom)

    return figure_svg(
        draw, label=f"training loss against {xlabel}, {title}", size_in=_SIZE_IN, place=(0.075, 0.155, 0.57, 0.74)
    )
