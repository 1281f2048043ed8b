"""Plots of a benchmark's rows: speed-up against pods, and losses against steps and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from workbench.base.table import Grid
from workbench.base.words import counted, number, percent
from workbench.benchmark.published import Published
from workbench.benchmark.result import LossPoint, Report
from workbench.display.benchmark.bars import text_bars
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.doc import Block, Figure, Note, Table
from workbench.display.kit.plots.figure import (
    COUNTS,
    DASHES,
    FOREGROUND,
    STEP,
    Look,
    Plot,
    Series,
    equal_series,
    look,
    time_axis,
)
from workbench.display.kit.plots.runs import SINCE
from workbench.display.kit.plots.static import look_of, plot_svg

_SCALING = (6.6, 3.4), (0.075, 0.13, 0.585, 0.83)  # inches, and the place of the axes
_PODS = COUNTS[1]
_LOSS = (5.6, 2.9), (0.11, 0.155, 0.535, 0.81)
_MOST_LINES = 8
_POINTS = 40  # longer curves are drawn as this number of means
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK = 16  # letters
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def scaling_blocks(sheet: Sheet, published: Sequence[Published]) -> list[Block]:
    """State the scaling plot's content and the source of its published line, or its absence."""
    series = scaling_series(sheet)
    if not series:
        why = "no row on several pods succeeded beside a row on one pod that did the same work"
        return [
            Note(
                f"Not drawn: {why} (same global batch, steps, "
                "precision, data and sequence handling)."
            )
        ]
    points = [
        (one.name, int(pods), speed)
        for one in series
        for pods, speed in zip(one.xs[_PODS], one.ys, strict=True)
    ]
    most = max(max(pods, speed) for _, pods, speed in points)
    bars = [
        (f"{name}, {pods}", speed / most, f"{speed:.2f} x of {pods}")
        for name, pods, speed in points
    ]
    words = [
        "Speed-up is samples/s over the one-pod row of the "
        "same technique, or of single where there is none."
    ]
    if any(line.speed_range for line in sheet.lines):
        words.append(
            "Repeated rows stand at their median; a stroke "
            "goes from the slowest to the fastest repeat."
        )
    ideals = [row for row in published if row.efficiency is not None and row.speed_up is None]
    words += [
        f"The line at {percent(row.efficiency)} of ideal is published, not measured here: "
        f"{row.model}, {row.technique} on {row.pods} nodes of {row.device}, from {row.source}"
        + (f" ({row.note})." if row.note else ".")
        for row in ideals
    ]
    plot = _scaling_plot(series, ideals)
    text = text_bars("speed-up in samples/s, by technique and pods", bars)
    return [Figure(_svg(plot, _PODS, *_SCALING), text=text, plot=plot), *map(Note, words)]


def scaling_series(sheet: Sheet) -> list[Series]:
    """Return the speed-ups of all rows, a line per configuration. A single point is no line.

    Repeated rows show the median, with the slowest and the fastest repeat.
    """
    several = len({line.model for line in sheet.lines if line.row.speed_up is not None}) > 1
    points: dict[tuple[int, str], list[tuple[int, float, float, float]]] = {}
    for place, part in enumerate(sheet.parts):
        for line in part.lines:
            if (speed_up := line.row.speed_up) is not None:
                name = " ".join(
                    filter(None, (line.technique, line.extra, line.model if several else ""))
                )
                low, high = line.speed_range or (1.0, 1.0)
                point = (line.row.pods, speed_up, low * speed_up, high * speed_up)
                points.setdefault((place, name), []).append(point)
    series = []
    for (_, name), its in points.items():
        pods, speeds, lows, highs = zip(*sorted(its, key=lambda point: point[0]), strict=True)
        if pods[-1] > 1:
            end = f"{speeds[-1]:.2f} x"
            one = Series(
                name=name,
                xs={_PODS: pods},
                ys=speeds,
                look=look_of(name),
                end=end,
                low=lows,
                high=highs,
            )
            series.append(one)
    return series


def _scaling_plot(series: Sequence[Series], ideals: Sequence[Published]) -> Plot:
    most = max(one.xs[_PODS][-1] for one in series)
    shares = [
        ("ideal", 1.0),
        *((f"{it.efficiency:.0%}, published: {it.pods} nodes", it.efficiency) for it in ideals),
    ]
    guide = Look(colour=FOREGROUND, marker="", dash="--")
    guides = [
        Series(name=name, xs={_PODS: (1, most)}, ys=(share, share * most), look=guide)
        for name, share in shares
        if share is not None
    ]
    words = "; ".join(
        f"{one.name}: "
        + ", ".join(f"{pods} pods {y:.2f}" for pods, y in zip(one.xs[_PODS], one.ys, strict=True))
        for one in series
    )
    label = f"speed-up in samples per second against pods: {words}"
    return Plot(
        label=label,
        y="speed-up in samples/s",
        axes=(_PODS,),
        series=[*guides, *series],
        from_zero=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossPlot:
    title: str
    plot: Plot
    by_step: str
    """The `<svg>` against steps; empty where all lines are the same."""
    by_second: str
    """The `<svg>` against seconds since the start was asked for."""


def loss_blocks(sheet: Sheet, report: Report) -> list[Block]:
    plots = loss_plots(sheet, {line.number: report.losses_of(line.row) for line in sheet.lines})
    if not plots:
        return [Note("Not drawn: no run logged a loss more than once.")]
    blocks: list[Block] = []
    for it in plots:
        both = Markup('<div class="wb-beside">{}{}</div>').format(
            Markup(it.by_step), Markup(it.by_second)
        )
        blocks.append(Figure(both, it.title if len(plots) > 1 else "", plot=it.plot))
        blocks += map(Note, it.plot.notes)
    return [*blocks, Note("Training loss as logged; of repeated rows, that of the first repeat.")]


def loss_plots(sheet: Sheet, losses: Mapping[int, Sequence[LossPoint]]) -> list[LossPlot]:
    """Draw training losses, at most eight rows per plot: a part of the table, or split by pods."""
    plots = []
    for part in sheet.parts:
        lines = [
            line for line in part.lines if line.number in losses and len(losses[line.number]) > 1
        ]
        for pods, chosen in _portions(lines):
            title = ", ".join(
                filter(
                    None, (chosen[0].model, pods, "" if part is sheet.parts[0] else part.heading)
                )
            )
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


def _loss_plot(
    title: str, lines: Sequence[Line], losses: Mapping[int, Sequence[LossPoint]]
) -> LossPlot:
    widest = max(-(-len(losses[line.number]) // _POINTS) for line in lines)
    means = [(line, _means(losses[line.number], widest)) for line in lines]
    unit, per = time_axis(max(points[-1].seconds for _, points in means))
    by_time = f"{unit} {SINCE}"
    by_technique = len({line.technique for line in lines}) > 1
    pods = sorted({line.row.pods for line in lines})
    series = [
        Series(
            name=line.label,
            xs={
                STEP: [point.step for point in points],
                by_time: [point.seconds / per for point in points],
            },
            ys=[point.loss for point in points],
            look=look_of(line.technique, DASHES[pods.index(line.row.pods) % len(DASHES)])
            if by_technique
            else look(n),
        )
        for n, (line, points) in enumerate(means)
    ]
    # Lines of techniques with the same work coincide: draw one, and name the others.
    groups = equal_series(series, STEP)
    notes = [f"Each point is the mean of {widest} logged steps."] if widest > 1 else []
    notes += [
        "Over steps the losses of rows "
        f"{', '.join(str(lines[n].number) for n in group)} are the same line."
        for group in groups
        if len(group) > 1
    ]
    all_equal = len(groups) == 1 < len(series)
    plot = Plot(
        label=f"training loss, {title}",
        y="training loss, nats per token",
        axes=(STEP, by_time) if 2 * len(groups) > len(series) else (by_time, STEP),
        series=series,
        notes=notes,
    )
    others = [", ".join(str(lines[n].number) for n in group[1:]) for group in groups]
    drawn = [
        replace(series[group[0]], end=f"= {rest}" if rest else "")
        for group, rest in zip(groups, others, strict=True)
    ]
    apart = replace(plot, series=drawn)
    return LossPlot(
        title=title,
        plot=plot,
        by_step="" if all_equal else _svg(apart, STEP, *_LOSS),
        by_second=_svg(plot, by_time, *_LOSS),
    )


def _svg(
    plot: Plot, axis: str, size_in: tuple[float, float], place: tuple[float, float, float, float]
) -> str:
    """Draw a plot whose lines have their names at their ends."""
    return plot_svg(plot, axis, size_in=size_in, place=place, columns=0)


def _means(points: Sequence[LossPoint], width: int) -> list[LossPoint]:
    """Return the mean of every `width` points, at the place of the last."""
    pieces = [points[first : first + width] for first in range(0, len(points), width)]
    return [
        LossPoint(p[-1].step, p[-1].seconds, sum(point.loss for point in p) / len(p))
        for p in pieces
    ]


def loss_table(sheet: Sheet, report: Report) -> list[Block]:
    rows = []
    for line in sheet.lines:
        points = report.losses_of(line.row)
        if len(points) > 1:
            at = [points[round(share * (len(points) - 1))] for share in _SHARES]
            losses = (f"{number(point.loss)} at {point.step:.0f}" for point in at)
            rows.append((line.label, _spark(points), *losses, f"{at[-1].seconds:.1f}"))
    columns = (
        "row",
        "over the steps",
        "first",
        "a quarter",
        "half",
        "three quarters",
        "last",
        "seconds to it",
    )
    caption = "Training loss, and the optimizer step it was at"
    return (
        [Table(Grid(columns=columns, rows=rows, right=columns[2:], whole=columns, caption=caption))]
        if rows
        else []
    )


def _spark(points: Sequence[LossPoint]) -> str:
    picked = [points[n * (len(points) - 1) // (_SPARK - 1)].loss for n in range(_SPARK)]
    low = min(picked)
    high = max(picked)
    return "".join(
        _SPARKS[round((loss - low) / ((high - low) or 1) * (len(_SPARKS) - 1))] for loss in picked
    )
