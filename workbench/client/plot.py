"""`RunPlot`: a plot of a run's curves. `PlotOptions`: the choices for plots of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import ConfigError, one_of
from workbench.rundir.events import EventKind
from workbench.rundir.figures.curves import EVERYWHERE
from workbench.rundir.figures.metrics import curves_of, known, metric_of, plot_names
from workbench.rundir.paths import RunPaths
from workbench.rundir.totals import TotalsTail

MEMORY = "memory"
Axis = Literal["steps", "time"]
_AXES = ("steps", "time")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotOptions:
    """Choices for a plot of curves. By default curves are drawn over steps, as logged."""

    x: Axis | None = None
    """X axis: `steps` or `time`. None: steps, and time for the memory of pods."""
    log: bool = False
    """Whether the y axis is logarithmic."""
    steps: tuple[float | None, float | None] | None = None
    """First and last optimizer step to draw; None for the beginning or the end."""
    smooth: float | Mapping[str, float] = 0.0
    """Weight of the earlier values in a moving average, from 0 to below 1, as in TensorBoard. A
    mapping gives the weight of each line by its name."""

    def __post_init__(self) -> None:
        if self.x is not None and self.x not in _AXES:
            raise one_of("x", self.x, _AXES)
        if self.steps is not None:
            _check_steps(self.steps)
        weights = self.smooth.values() if isinstance(self.smooth, Mapping) else [self.smooth]
        for weight in weights:
            if not _is_number(weight) or not 0 <= weight < 1:
                raise ConfigError(
                    f"smooth {weight!r} is not a weight. Give a number from 0 (as logged) to below "
                    "1, such as smooth=0.8."
                )

    @property
    def within(self) -> tuple[float, float]:
        """Return the first and the last step to draw."""
        if self.steps is None:
            return EVERYWHERE
        first, last = self.steps
        low, high = EVERYWHERE
        return low if first is None else first, high if last is None else last

    @property
    def needs_all(self) -> bool:
        """Whether the plot needs every point of the curves."""
        return self.steps is not None or bool(self.smooth)

    @property
    def words(self) -> str:
        """Name the range of steps for a title; empty for all steps."""
        if self.steps is None:
            return ""
        first, last = self.steps
        if first is None:
            return f", steps up to {last:,g}"
        if last is None:
            return f", steps from {first:,g}"
        return f", steps {first:,g} to {last:,g}"

    def weight_of(self, line: str) -> float:
        """Return the weight for a line; 0 draws the line as logged."""
        if isinstance(self.smooth, Mapping):
            return self.smooth.get(line, 0.0)
        return self.smooth

    def check_lines(self, plot: str, lines: Iterable[str]) -> None:
        """Refuse to smooth a line that the plot does not have.

        Raises:
            ConfigError: A name is no line of the plot, or the plot has markers alone.
        """
        names = list(lines)
        if self.smooth and not names:
            raise ConfigError(
                f"smooth does nothing in the plot of {plot}: evaluations are drawn as markers. "
                "Leave smooth out."
            )
        if isinstance(self.smooth, Mapping):
            for name in self.smooth:
                if name not in names:
                    raise one_of("smooth: line", name, names)


def _check_steps(steps: Sequence[float | None]) -> None:
    is_pair = isinstance(steps, Sequence) and len(steps) == 2
    if is_pair and all(step is None or _is_number(step) for step in steps):
        first, last = steps
        if first is None or last is None or first < last:
            return
    raise ConfigError(
        f"steps {steps!r} is not a range. Give the first and the last step, such as "
        "steps=(100, 200) or steps=(100, None)."
    )


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


AS_LOGGED = PlotOptions()


@dataclass(frozen=True, slots=True)
class RunPlot(LiveDisplayable):
    """A plot of a run. A cell that ends with the plot shows it, live until the run ends."""

    path: Path
    """Run directory."""
    name: str = "loss"
    """Name of a metric, or `memory`."""
    options: PlotOptions = field(default=AS_LOGGED)
    """Axis, scale, range of steps and smoothing."""

    def __post_init__(self) -> None:
        if self.name == MEMORY:
            self._check_memory()
            return
        curves = curves_of(self.name)
        lines = [curve for curve in curves if metric_of(curve).event != EventKind.EVAL]
        self.options.check_lines(self.name, lines)
        if known(self.name) is not None:
            return
        # A number without a row in the table has a plot once the run has reported the number.
        reported = TotalsTail(RunPaths(self.path).events).read().curve_names
        if reported.isdisjoint(curves):
            names = [*plot_names(), MEMORY, *sorted(reported)]
            raise one_of("plot", self.name, dict.fromkeys(names))

    def _check_memory(self) -> None:
        self.options.check_lines(MEMORY, [MEMORY])
        given = [
            name
            for name, is_given in (
                ("x='steps'", self.options.x == "steps"),
                ("steps", self.options.steps is not None),
            )
            if is_given
        ]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} cannot be used for the plot of memory: pods report their "
                "memory over time, not by step. Leave it out."
            )
