"""A plot as data: lines and markers over x axes. Pictures and words are made from the data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.words import number

COLOURS = (
    "#3b8ede",
    "#d0741a",
    "#2f9a75",
    "#c76bb0",
    "#9b8410",
    "#d5553f",
    "#6f7fd8",
    "#4696a6",
)
"""At least 3:1 on white and on near-black alike, and apart for the colour-blind (after Okabe and
Ito)."""
RUN_COLOURS = (
    *COLOURS,
    "#a05ad6",
    "#5f9a2c",
    "#b0763f",
    "#e0508f",
    "#7a8794",
    "#8a6fb5",
    "#c45c74",
    "#1f8f9e",
)
"""Colours of runs, more than `COLOURS`: a run keeps its colour beside any other runs."""
_MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
FOREGROUND = "#010203"
"""Stands for the page's own text colour until an SVG is done."""
STEP = "optimizer step"
COUNTS = (STEP, "pods", "row")
"""The axes that have whole numbers alone."""
_UNITS = (
    ("seconds", 1.0, 180.0),
    ("minutes", 60.0, 3 * 3600.0),
    ("hours", 3600.0, float("inf")),
)
"""Unit of time, its seconds, and the time from which the next unit is better."""
_NEAR = 0.01  # share of a plot's height: closer lines look like one


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Appearance of a line: colour and marker tell lines apart, each without the other.

    Marker and dash are matplotlib's letters. Lines are solid; a dashed line lies upon another line,
    or is a guide.
    """

    colour: str
    marker: str
    dash: str = "-"


def look(place: int) -> Look:
    return Look(
        colour=COLOURS[place % len(COLOURS)],
        marker=_MARKERS[place % len(_MARKERS)],
        # The colours begin again after the last one.
        dash=DASHES[place // len(COLOURS) % len(DASHES)],
    )


def with_marker(style: Look, place: int) -> Look:
    """Return the look with the marker `place` further on."""
    marker = _MARKERS[(_MARKERS.index(style.marker) + place) % len(_MARKERS)]
    return replace(style, marker=marker)


def look_of_run(run_id: str) -> Look:
    """Return the look of a run, which depends on the run's id alone.

    Markers tell runs of the same colour apart.
    """
    digest = hashlib.sha256(run_id.encode(errors="replace")).digest()
    return Look(
        colour=RUN_COLOURS[digest[0] % len(RUN_COLOURS)],
        marker=_MARKERS[digest[1] % len(_MARKERS)],
    )


def looks_of_runs(run_ids: Sequence[str]) -> list[Look]:
    """Return looks of different colours: a run whose colour is taken gets a free one.

    Example:
        >>> one, other = looks_of_runs(["r1", "r1"])
        >>> one == look_of_run("r1"), one.colour == other.colour
        (True, False)
    """
    looks: list[Look] = []
    for run_id in run_ids:
        style = look_of_run(run_id)
        taken = {other.colour for other in looks}
        free = [colour for colour in RUN_COLOURS if colour not in taken]
        if style.colour in taken and free:
            style = replace(style, colour=free[0])
        looks.append(style)
    return looks


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    name: str
    xs: Mapping[str, Sequence[float]]
    """By the title of the x axis."""
    ys: Sequence[float]
    look: Look
    joined: bool = True
    """Whether points are joined. Evaluations are markers: values between them are unknown."""
    low: Sequence[float] = ()
    """Lower bounds of the points, paired with `high`; empty for single measurements."""
    high: Sequence[float] = ()
    smoothed: Sequence[float] = ()
    """Smoothed values at the points, as the user asked. Empty: drawn as logged."""

    @property
    def line(self) -> Sequence[float]:
        """Values of the full-colour line."""
        return self.smoothed or self.ys


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    label: str
    """Description of the plot for readers who do not see it."""
    y: str
    """The title of the y axis, with its unit."""
    axes: Sequence[str]
    """Titles of the available x axes, with units; the default first."""
    series: Sequence[Series]
    from_zero: bool = False
    log: bool = False
    """Whether the y axis is logarithmic."""
    notes: Sequence[str] = ()
    """Notes on invisible facts, such as overlapping lines."""

    def __bool__(self) -> bool:
        """Whether there is something to draw: one point is a figure, and no plot."""
        return any(len(series.ys) > 1 for series in self.series)


def time_axis(longest_s: float) -> tuple[str, float]:
    """Return the unit for so long a time, and how many seconds it has.

    Example:
        >>> time_axis(90), time_axis(7200)
        (('seconds', 1.0), ('minutes', 60.0))
    """
    for unit, per, most_s in _UNITS:
        if longest_s < most_s:
            return unit, per
    return "seconds", 1.0  # for NaN


def told_apart(series: Sequence[Series], axis: str) -> list[Series]:
    """Return the lines, dashed where an earlier line lies below.

    Example:
        >>> a = Series(name="a", xs={"x": [1, 2]}, ys=[9.0, 1.0], look=look(0))
        >>> b = Series(name="b", xs={"x": [1, 2]}, ys=[9.0, 5.0], look=look(1))
        >>> [one.look.dash for one in told_apart([a, b, a], "x")]
        ['-', '-', '--']
    """
    apart = list(series)
    joined = [place for place, one in enumerate(series) if one.joined and one.ys]
    for group in equal_series([series[place] for place in joined], axis):
        for over, member in enumerate(group[1:], 1):
            one = series[joined[member]]
            if one.look.dash == DASHES[0]:
                dashed = replace(one.look, dash=DASHES[over % len(DASHES)])
                apart[joined[member]] = replace(one, look=dashed)
    return apart


def equal_series(series: Sequence[Series], axis: str) -> list[list[int]]:
    """Return the indices of overlapping lines over an axis, grouped; every index appears once.

    Example:
        >>> a = Series(name="a", xs={"x": [1, 2]}, ys=[9.0, 1.0], look=look(0))
        >>> b = Series(name="b", xs={"x": [1, 2]}, ys=[9.0, 5.0], look=look(1))
        >>> equal_series([a, b, a], "x")
        [[0, 2], [1]]
    """
    values = [value for one in series for value in one.ys]
    near = _NEAR * (max(values, default=0.0) - min(values, default=0.0))
    groups: list[list[int]] = []
    for place, one in enumerate(series):
        for group in groups:
            if _is_near(series[group[0]], one, axis, near):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _is_near(
    first: Series,
    other: Series,
    axis: str,
    near: float,
) -> bool:
    """Return whether two lines have the same places along x, and no values further apart."""
    if list(first.xs[axis]) != list(other.xs[axis]):
        return False
    return all(abs(a - b) <= near for a, b in zip(first.ys, other.ys, strict=True))


def plot_words(plot: Plot) -> str:
    """Return the first and last value of every line as text."""
    axis = plot.axes[0]
    lines = []
    for one in plot.series:
        if len(one.ys):
            xs = one.xs[axis]
            first = f"{number(one.line[0])} at {axis} {number(xs[0])}"
            last = f"{number(one.line[-1])} at {number(xs[-1])}"
            lines.append(f"{one.name}: {first}, {last}")
    return "\n".join([*lines, *plot.notes])
