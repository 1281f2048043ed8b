"""Speed-up against pods over the rows of a benchmark, with published shares of the ideal as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.benchmark.published import Published
from workbench.display.benchmark.sheet import Sheet
from workbench.display.kit.plots.figure import COUNTS, FOREGROUND, Look, Plot, Series
from workbench.display.kit.plots.static import look_of, plot_svg

_SIZE_IN = (6.6, 3.4)
_PLACE = (0.075, 0.13, 0.585, 0.83)
_PODS = COUNTS[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
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


def scaling_plot(sheet: Sheet, published: Sequence[Published] = ()) -> Plot:
    """Return the speed-up in samples/s against pods, with the ideal line and published shares of it."""
    series = scaling_series(sheet)
    most = max((point.pods for points in series.values() for point in points), default=1)
    shares = [("ideal", 1.0)] + [
        (f"{row.efficiency:.0%}, published: {row.pods} nodes", row.efficiency)
        for row in published
        if row.efficiency is not None and row.speed_up is None
    ]
    guide = Look(colour=FOREGROUND, marker="", dash="--")
    guides = [
        Series(name=name, xs={_PODS: (1, most)}, ys=(share, share * most), look=guide)
        for name, share in shares
        if series
    ]
    words = "; ".join(
        f"{name.rstrip(chr(0))}: " + ", ".join(f"{p.pods} pods {p.speed_up:.2f}" for p in points)
        for name, points in series.items()
    )
    lines = [_line(name.rstrip("\0"), points) for name, points in series.items()]
    label = f"speed-up in samples per second against pods: {words}"
    return Plot(label=label, y="speed-up in samples/s", axes=(_PODS,), series=[*guides, *lines], from_zero=True)


def scaling_svg(plot: Plot) -> str:
    """Draw it; the names of the lines stand at their ends."""
    return plot_svg(plot, size_in=_SIZE_IN, place=_PLACE, columns=0)


def _line(name: str, points: Sequence[ScalingPoint]) -> Series:
    return Series(
        name=name, xs={_PODS: [point.pods for point in points]}, ys=[point.speed_up for point in points],
        look=look_of(name), end=f"{points[-1].speed_up:.2f} x", low=[point.low for point in points],
        high=[point.high for point in points],
    )  # fmt: skip
