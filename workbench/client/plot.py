"""`RunPlot`: a plot of a run's curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import one_of
from workbench.base.shown import ShownLive
from workbench.rundir.events import read_events
from workbench.rundir.metrics import curves_of, known, plot_names
from workbench.rundir.paths import RunPaths
from workbench.rundir.totals import RunTotals

MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class RunPlot(ShownLive):
    """A plot of a run. A cell that ends with the plot shows it, live until the run ends."""

    path: Path
    """Run directory."""
    name: str = "loss"
    """Name of a metric, or `memory`."""

    def __post_init__(self) -> None:
        if self.name == MEMORY or known(self.name) is not None:
            return
        # A number without a row in the table has a plot once the run has reported the number.
        reported = RunTotals.of(read_events(RunPaths(self.path).events)).curve_names
        if reported.isdisjoint(curves_of(self.name)):
            names = [*plot_names(), MEMORY, *sorted(reported)]
            raise one_of("plot", self.name, dict.fromkeys(names))
