"""A plot as data: lines and markers over one or more x axes. Its static and its interactive form are drawn from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.words import number

COLOURS = ("#3b8ede", "#d0741a", "#2f9a75", "#c76bb0", "#9b8410", "#d5553f", "#6f7fd8", "#4696a6")
"""At least 3:1 on white and on near-black alike, and apart for the colour-blind (after Okabe and Ito)."""
_MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
FOREGROUND = "#010203"
"""Stands for the page's own text colour until an SVG is done."""
STEP = "optimizer step"
COUNTS = (STEP, "pods", "row")
"""The axes that have whole numbers alone."""
_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, float("inf")))
_NEAR = 0.01  # of a plot's height: closer lines are one line to the eye


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a line is told from others, without its colour too; marker and dash are matplotlib's letters."""

    colour: str
    marker: str
    dash: str = "-"


def look(place: int) -> Look:
    return Look(
        colour=COLOURS[place % len(COLOURS)],
        marker=_MARKERS[place % len(_MARKERS)],
        dash=DASHES[place % len(DASHES)],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    xs: Mapping[str, Sequence[float]]
    """By the title of the x axis."""
    ys: Sequence[float]
    look: Look
    end: str = ""
    """What is said of its last point, where its name stands beside that."""
    joined: bool = True
    """Whether it is a line; evaluations are markers, as nobody knows what was between two of them."""
    low: Sequence[float] = ()
    """The lowest of what each point is the middle of, with `high`; empty where a point is one measurement."""
    high: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    label: str
    """What it is, for those who do not see it."""
    y: str
    """The title of the y axis, with its unit."""
    axes: Sequence[str]
    """The titles of the x axes that it can be seen over, with their units; the usual one first."""
    series: Sequence[Series]
    from_zero: bool = False
    notes: Sequence[str] = ()
    """What the eye cannot see, such as lines that lie on each other."""

    def __bool__(self) -> bool:
        """Whether there is something to draw: one point is a figure, and no plot."""
        return any(len(series.ys) > 1 for series in self.series)


def time_axis(longest_s: float) -> tuple[str, float]:
    """Return the unit for so long a time, and how many seconds it has.

    Example:
        >>> time_axis(90), time_axis(7200)
        (('seconds', 1.0), ('minutes', 60.0))
    """
    return next(((unit, per) for unit, per, most in _UNITS if longest_s < most), ("seconds", 1.0))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average that TensorBoard draws, whose start is not drawn towards zero.

    Example:
        >>> [round(value, 3) for value in smoothed([4.0, 4.0, 1.0], 0.5)]
        [4.0, 4.0, 2.286]
    """
    means, last = [], 0.0
    for place, value in enumerate(values, 1):
        last = last * weight + (1 - weight) * value
        means.append(last / (1 - weight**place))
    return means


def equal_series(series: Sequence[Series], axis: str) -> list[list[int]]:
    """Return the places of lines that lie on each other over an axis, together; each place once.

    Example:
        >>> a, b = (Series(name="", xs={"x": [1, 2]}, ys=ys, look=look(0)) for ys in ([9.0, 1.0], [9.0, 5.0]))
        >>> equal_series([a, b, a], "x")
        [[0, 2], [1]]
    """
    values = [value for one in series for value in one.ys]
    near = _NEAR * (max(values, default=0.0) - min(values, default=0.0))
    groups: list[list[int]] = []
    for place, one in enumerate(series):
        for group in groups:
            first = series[group[0]]
            if list(first.xs[axis]) == list(one.xs[axis]) and all(
                abs(a - b) <= near for a, b in zip(first.ys, one.ys, strict=True)
            ):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def plot_words(plot: Plot) -> str:
    """Return where each line begins and ends, a line of text each."""
    axis = plot.axes[0]
    lines = [
        f"{one.name}: {number(one.ys[0])} at {axis} {number(one.xs[axis][0])}, "
        f"{number(one.ys[-1])} at {number(one.xs[axis][-1])}"
        for one in plot.series
        if len(one.ys)
    ]
    return "\n".join([*lines, *plot.notes])
