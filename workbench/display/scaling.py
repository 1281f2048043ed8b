"""Plots over the rows of a benchmark: speed-up against pods, and losses against steps and seconds, as static SVG.

Every line is labelled where it ends. A technique has the same colour and the same marker in every plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.display.benchsheet import Line, Sheet
from workbench.display.plots import COLOURS, FOREGROUND, dress_axes, figure_svg
from workbench.results.losses import Losses, LossPoint
from workbench.results.reference import Published
from workbench.spec.technique import Technique

__all__ = ["LossPlot", "apart", "look_of", "loss_plots", "scaling_series", "scaling_svg"]

_SIZE_IN = (6.6, 3.4)
_LOSS_SIZE_IN = (5.6, 2.9)
_MARKERS = "osD^vPX*"
_NAMES = tuple(str(technique) for technique in Technique)
_MOST_LINES = 8
_POINTS = 40  # a longer curve is drawn as so many means
_LABEL_SHARE = 0.075  # of the plot's height, that one label takes


def look_of(technique: str) -> tuple[str, str]:
    """Give the colour and the marker of a technique."""
    name = technique.partition(" ")[0]
    place = _NAMES.index(name) if name in _NAMES else len(_NAMES)
    return COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)]


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """Move values apart until none is nearer than `least` to the next; those that are far enough stay.

    Example:
        >>> [round(y, 2) for y in apart([1.0, 1.1, 5.0], 0.5)]
        [0.8, 1.3, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    blocks: list[tuple[float, list[int]]] = []  # middle, and who shares it
    for n in order:
        middle, members = wanted[n], [n]
        while blocks and middle - least * (len(members) - 1) / 2 < (
            blocks[-1][0] + least * (len(blocks[-1][1]) - 1) / 2 + least
        ):
            before, others = blocks.pop()
            middle = (before * len(others) + middle * len(members)) / (len(others) + len(members))
            members = others + members
        blocks.append((middle, members))
    found = [0.0] * len(wanted)
    for middle, members in blocks:
        for place, n in enumerate(members):
            found[n] = middle + least * (place - (len(members) - 1) / 2)
    return found


def scaling_series(sheet: Sheet) -> dict[str, list[tuple[int, float]]]:
    """Give, by label, the pods and the speed-up of every row that has one; a single point is no series."""
    several = len({line.model for line in sheet.lines if line.row.speed_up is not None}) > 1
    series: dict[str, list[tuple[int, float]]] = {}
    for number, part in enumerate(sheet.parts):
        for line in part.lines:
            if line.row.speed_up is not None:
                name = " ".join(filter(None, (line.technique, line.extra, line.model if several else "")))
                series.setdefault(name + "\0" * number, []).append((line.row.pods, line.row.speed_up))
    return {name: sorted(points) for name, points in series.items() if any(pods > 1 for pods, _ in points)}


def scaling_svg(sheet: Sheet, published: Sequence[Published] = ()) -> str:
    """Draw the speed-up in samples/s against pods, with the ideal line and published shares of it.

    Args:
        sheet: The table.
        published: Published figures; those with an efficiency and no speed-up are drawn as a share of the ideal.

    Returns:
        An `<svg>` element; an empty text where no row on several pods has a speed-up.
    """
    series = scaling_series(sheet)
    if not series:
        return ""
    most = max(pods for points in series.values() for pods, _ in points)
    guides: list[tuple[str, float, float]] = [("ideal", 1.0, 1.0)]
    guides += [
        (f"{row.efficiency:.0%}, published: {row.pods} nodes", row.efficiency, 0.6)
        for row in published
        if row.efficiency is not None and row.speed_up is None
    ]
    top = 1.06 * max(most, *(speed for points in series.values() for _, speed in points))

    def draw(axes: Any) -> None:
        labels: list[tuple[float, float, str, str]] = []
        for name, share, alpha in guides:
            axes.plot([0, most], [0, share * most], color=FOREGROUND, alpha=alpha, linewidth=1, dashes=(4, 3))
            labels.append((most, share * most, name, FOREGROUND))
        for name, points in series.items():
            shown = name.rstrip("\0")
            colour, marker = look_of(shown)
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.6)
            labels.append((xs[-1], ys[-1], f"{shown} {ys[-1]:.2f} x", colour))
        axes.set_xlim(1 - 0.07 * (most - 1), most)
        axes.set_ylim(0, top)
        axes.set_xticks(sorted({pods for points in series.values() for pods, _ in points} | {1}))
        dress_axes(axes, "pods")
        axes.set_title("speed-up in samples/s", loc="left", fontsize=8.5, color=FOREGROUND)
        _label(axes, labels, top)

    said = "; ".join(f"{n.rstrip(chr(0))}: " + ", ".join(f"{p} pods {s:.2f}" for p, s in v) for n, v in series.items())
    return figure_svg(
        draw, label=f"speed-up in samples per second against pods: {said}", size_in=_SIZE_IN,
        place=(0.06, 0.13, 0.6, 0.78),
    )  # fmt: skip


def _label(axes: Any, labels: Sequence[tuple[float, float, str, str]], top: float, bottom: float = 0.0) -> None:
    """Write each line's name beside its end, apart from each other, with a thin line from one to the other."""
    right = axes.get_xlim()[1]
    span = right - axes.get_xlim()[0]
    places = apart([y for _, y, _, _ in labels], _LABEL_SHARE * (top - bottom))
    lowest = min(places, default=0.0)
    lift = max(0.0, bottom - lowest)
    for (x, y, text, colour), place in zip(labels, places, strict=True):
        at = place + lift
        axes.plot(
            [x, right + 0.02 * span, right + 0.04 * span], [y, at, at], color=colour, linewidth=0.7, alpha=0.6,
            clip_on=False, linestyle=(0, (1, 1.5)),
        )  # fmt: skip
        said = axes.text(right + 0.05 * span, at, text, va="center", color=FOREGROUND)
        said.set_parse_math(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPlot:
    """One plot of losses."""

    title: str
    """What its rows have in common."""
    lines: tuple[Line, ...]
    """The rows, by which the plot's lines are called."""
    by_step: str
    """The `<svg>` against optimizer steps."""
    by_second: str
    """The `<svg>` against seconds since the start was asked for."""
    note: str
    """How many steps a point is the mean of, where it is of several; else empty."""


def loss_plots(sheet: Sheet, losses: Mapping[int, Losses]) -> list[LossPlot]:
    """Draw training losses, at most eight rows a plot: a part of the table at once, or by its numbers of pods.

    Args:
        sheet: The table.
        losses: By `Line.number`, the losses of the (first repeat of the) row.
    """
    plots = []
    for part in sheet.parts:
        lines = [line for line in part.lines if line.number in losses and len(losses[line.number].train) > 1]
        for said, chosen in _portions(lines):
            title = ", ".join(filter(None, (chosen[0].model, said, "" if part is sheet.parts[0] else part.heading)))
            plots.append(_loss_plot(title, chosen, losses))
    return plots


def _portions(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    if len(lines) <= _MOST_LINES:
        return [("", list(lines))] if lines else []
    by_pods: dict[int, list[Line]] = {}
    for line in lines:
        by_pods.setdefault(line.row.pods, []).append(line)
    return [
        (f"{pods} {'pod' if pods == 1 else 'pods'}", group[first : first + _MOST_LINES])
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
    """Give the mean of every so many points, at the place of the last of them."""
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
            colour, marker = look_of(line.technique) if by_technique else (COLOURS[number], _MARKERS[number])
            xs, ys = [getattr(point, of) for point in points], [point.loss for point in points]
            axes.plot(
                xs, ys, color=colour, linewidth=1.4, marker=marker, markersize=3, markevery=max(1, len(xs) // 6),
                linestyle=("-", "--", ":", "-.")[styles.index(line.row.pods) % 4] if by_technique else "-",
            )  # fmt: skip
            labels.append((xs[-1], ys[-1], line.label, colour))
        axes.set_ylim(bottom, top)
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=of == "step"))
        dress_axes(axes, xlabel)
        axes.set_title("training loss", loc="left", fontsize=8.5, color=FOREGROUND)
        _label(axes, labels, top, bottom)

    return figure_svg(
        draw, label=f"training loss against {xlabel}, {title}", size_in=_LOSS_SIZE_IN, place=(0.075, 0.155, 0.57, 0.74)
    )
