"""Speed-up against pods over the rows of a benchmark, as static SVG with published shares of the ideal as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.benchmark.published import Published
from workbench.display.benchmark.sheet import Sheet
from workbench.display.kit.labels import LineLabel, look_of, write_labels
from workbench.display.kit.plots import FOREGROUND, dress_axes, figure_svg

__all__ = ["ScalingPoint", "scaling_series", "scaling_svg"]

_SIZE_IN = (6.6, 3.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """The speed-up of one row."""

    pods: int
    speed_up: float
    """Its samples/s over that of the one-pod row; of repeats the median."""
    low: float
    """The same of the slowest repeat; of a single run the speed-up itself."""
    high: float


def scaling_series(sheet: Sheet) -> dict[str, list[ScalingPoint]]:
    """Return, by label, the speed-up of every row that has one; what ran on one pod only is not a series."""
    several = len({line.model for line in sheet.lines if line.row.speed_up is not None}) > 1
    series: dict[str, list[ScalingPoint]] = {}
    for number, part in enumerate(sheet.parts):
        for line in part.lines:
            speed_up = line.row.speed_up
            if speed_up is not None:
                name = " ".join(filter(None, (line.technique, line.extra, line.model if several else "")))
                low, high = line.speed_range or (1.0, 1.0)
                point = ScalingPoint(pods=line.row.pods, speed_up=speed_up, low=low * speed_up, high=high * speed_up)
                series.setdefault(name + "\0" * number, []).append(point)
    ordered = {name: sorted(points, key=lambda p: p.pods) for name, points in series.items()}
    return {name: points for name, points in ordered.items() if points[-1].pods > 1}


def scaling_svg(sheet: Sheet, published: Sequence[Published] = ()) -> str:
    """Draw the speed-up in samples/s against pods, with the ideal line and published shares of it."""
    series = scaling_series(sheet)
    if not series:
        return ""
    points = [point for of in series.values() for point in of]
    most = max(point.pods for point in points)
    top = 1.06 * max(most, *(point.high for point in points))
    guides: list[tuple[str, float, float]] = [("ideal", 1.0, 1.0)]
    guides += [
        (f"{row.efficiency:.0%}, published: {row.pods} nodes", row.efficiency, 0.6)
        for row in published
        if row.efficiency is not None and row.speed_up is None
    ]

    def draw(axes: Any) -> None:
        labels = []
        for name, share, alpha in guides:
            axes.plot([0, most], [0, share * most], color=FOREGROUND, alpha=alpha, linewidth=1, dashes=(4, 3))
            labels.append(LineLabel(x=most, y=share * most, text=name, colour=FOREGROUND, dashes="--"))
        for name, of in series.items():
            shown = name.rstrip("\0")
            colour, marker = look_of(shown)
            xs, ys = [point.pods for point in of], [point.speed_up for point in of]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.6)
            axes.vlines(xs, [p.low for p in of], [p.high for p in of], color=colour, linewidth=1.2)
            text = f"{shown} {ys[-1]:.2f} x"
            labels.append(LineLabel(x=xs[-1], y=ys[-1], text=text, colour=colour, marker=marker))
        axes.set_xlim(1 - 0.07 * (most - 1), most)
        axes.set_ylim(0, top)
        axes.set_xticks(sorted({point.pods for point in points} | {1}))
        dress_axes(axes, "pods", "speed-up in samples/s")
        write_labels(axes, labels, top)

    label = "; ".join(
        f"{name.rstrip(chr(0))}: " + ", ".join(f"{p.pods} pods {p.speed_up:.2f}" for p in of)
        for name, of in series.items()
    )
    return figure_svg(
        draw, label=f"speed-up in samples per second against pods: {label}", size_in=_SIZE_IN,
        place=(0.06, 0.13, 0.6, 0.78),
    )  # fmt: skip
