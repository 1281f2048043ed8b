"""Plots of a benchmark's rows: speed-up against pods, and the losses of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from markupsafe import Markup

from workbench.base.words import percent, pluralize
from workbench.benchmark.published import Published
from workbench.benchmark.result import Report
from workbench.display.benchmark.sheet import Line, Part, Sheet
from workbench.display.kit.doc import Block, Figure, Note
from workbench.display.kit.plots.figure import (
    COUNTS,
    DASHES,
    FOREGROUND,
    Look,
    Plot,
    Series,
    look,
)
from workbench.display.kit.plots.runs import losses_plot
from workbench.display.kit.plots.static import look_of, plot_svg
from workbench.rundir.view import RunView

_SCALING = (6.6, 3.4)  # inches
_PODS = COUNTS[1]
_LOSS = (5.6, 2.9)
_MOST_LINES = 8
NO_SCALING = (
    "Not drawn: no row on several pods succeeded beside a row on one pod that did the same work "
    "(same global batch, steps, precision, data and sequence handling)."
)
NO_LOSS = "Not drawn: no run logged a loss more than once."


def scaling_blocks(sheet: Sheet, published: Sequence[Published]) -> list[Block]:
    """State the content of the scaling plot and the source of the published line, if any."""
    series = scaling_series(sheet)
    if not series:
        return []
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
    for row in ideals:
        note = f" ({row.note})." if row.note else "."
        words.append(
            f"The line at {percent(row.efficiency)} of ideal is published, not measured here: "
            f"{row.model}, {row.technique} on {row.pods} nodes of {row.device}, from {row.source}"
            + note
        )
    plot = _scaling_plot(series, ideals)
    figure = Figure(plot_svg(plot, _PODS, size_in=_SCALING), plot=plot)
    return [figure, *(Note(text) for text in words)]


def scaling_series(sheet: Sheet) -> list[Series]:
    """Return the speed-ups of all rows, a line per configuration. A single point is no line.

    Repeated rows show the median, with the slowest and the fastest repeat.
    """
    models = {line.model for line in sheet.lines if line.row.speed_up is not None}
    # The points of a configuration: pods, speed-up, and those of the slowest and fastest repeat.
    points: dict[tuple[int, str], list[tuple[int, float, float, float]]] = {}
    for place, part in enumerate(sheet.parts):
        for line in part.lines:
            speed_up = line.row.speed_up
            if speed_up is None:
                continue
            parts = [line.technique, line.extra]
            if len(models) > 1:
                parts.append(line.model)
            name = " ".join(text for text in parts if text)
            low, high = line.speed_range or (1.0, 1.0)
            point = (line.row.pods, speed_up, low * speed_up, high * speed_up)
            points.setdefault((place, name), []).append(point)
    series = []
    for (_, name), unsorted in points.items():
        by_pods = sorted(unsorted, key=lambda point: point[0])
        pods, speeds, lows, highs = zip(*by_pods, strict=True)
        if pods[-1] > 1:
            one = Series(
                name=f"{name} {speeds[-1]:.2f} x",
                xs={_PODS: pods},
                ys=speeds,
                look=look_of(name),
                low=lows,
                high=highs,
            )
            series.append(one)
    # A technique with and without adapters has one look.
    if len({one.look for one in series}) < len(series):
        return [replace(one, look=look(place)) for place, one in enumerate(series)]
    return series


def _scaling_plot(series: Sequence[Series], ideals: Sequence[Published]) -> Plot:
    most = max(one.xs[_PODS][-1] for one in series)
    shares = [("ideal", 1.0)]
    for row in ideals:
        if row.efficiency is not None:
            name = f"{row.efficiency:.0%}, published: {row.pods} nodes"
            shares.append((name, row.efficiency))
    # Straight lines through one pod: ideal scaling, and published shares of it.
    guides = [
        Series(
            name=name,
            xs={_PODS: (1, most)},
            ys=(share, share * most),
            look=Look(colour=FOREGROUND, marker="", dash=dash),
        )
        for (name, share), dash in zip(shares, cycle(DASHES[1:]), strict=False)
    ]
    # The label has the figures for readers who see no picture.
    lines = []
    for one in series:
        points = [f"{pods} pods {y:.2f}" for pods, y in zip(one.xs[_PODS], one.ys, strict=True)]
        lines.append(f"{one.name}: {', '.join(points)}")
    words = "; ".join(lines)
    return Plot(
        label=f"speed-up in samples per second against pods: {words}",
        y="speed-up in samples/s",
        axes=(_PODS,),
        series=[*guides, *series],
        from_zero=True,
    )


def loss_blocks(sheet: Sheet, report: Report) -> list[Block]:
    plots = loss_plots(sheet, report)
    blocks: list[Block] = []
    for plot in plots:
        drawn = [Markup(plot_svg(plot, axis, size_in=_LOSS)) for axis in plot.axes]
        both = Markup('<div class="wb-beside">{}</div>').format(Markup("").join(drawn))
        blocks.append(Figure(both, plot.label.capitalize() if len(plots) > 1 else "", plot=plot))
    if plots and any(len(line.rows) > 1 for line in sheet.lines):
        blocks.append(Note("Of repeated rows, the first repeat is drawn."))
    return blocks


def loss_plots(sheet: Sheet, report: Report) -> list[Plot]:
    """Return losses, at most eight rows per plot: comparable losses, or split by pods."""
    drawn: list[tuple[str, list[Line]]] = []
    for parts_together in _together(sheet.parts):
        lines = [line for each in parts_together for line in each.lines if _losses(line, report)]
        if lines:
            drawn.append((parts_together[0].difference, lines))
    models = [lines[0].model for _, lines in drawn]
    plots = []
    for difference, lines in drawn:
        model = lines[0].model
        # The model alone tells most plots apart.
        why = difference if models.count(model) > 1 else ""
        for pods, chosen in _portions(lines):
            title = ", ".join(text for text in (model, pods, why) if text)
            runs = [each for line in chosen for each in _losses(line, report)]
            plot = losses_plot(runs, distinct=True)
            plots.append(replace(plot, label=f"{plot.label}: {title}"))
    return plots


def _losses(line: Line, report: Report) -> list[tuple[str, RunView]]:
    """Return the label and the view of a line whose run logged two losses; else nothing."""
    view = report.view_of(line.row)
    return [(line.label, view)] if view and len(view.curves["loss"]) > 1 else []


def _together(parts: Sequence[Part]) -> list[list[Part]]:
    """Put parts with comparable losses together, for example runs of different lengths."""
    together: dict[object, list[Part]] = {}
    for part in parts:
        together.setdefault(part.losses, []).append(part)
    return list(together.values())


def _portions(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    if not lines:
        return []
    if len(lines) <= _MOST_LINES:
        return [("", list(lines))]
    by_pods: dict[int, list[Line]] = {}
    for line in lines:
        by_pods.setdefault(line.row.pods, []).append(line)
    portions = []
    for pods, group in sorted(by_pods.items()):
        title = pluralize(pods, "pod")
        for first in range(0, len(group), _MOST_LINES):
            portion = group[first : first + _MOST_LINES]
            portions.append((title, portion))
    return portions
