"""`RunPlot`: a plot of a run's curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import one_of
from workbench.base.shown import ShownLive

PLOTS = ("loss", "perplexity", "learning_rate", "grad_norm", "samples_per_s", "memory")


@dataclass(frozen=True, slots=True)
class RunPlot(ShownLive):
    """A plot of a run. A cell that ends with the plot shows it, live until the run ends."""

    path: Path
    """Run directory."""
    name: str = "loss"

    def __post_init__(self) -> None:
        if self.name not in PLOTS:
            raise one_of("plot", self.name, PLOTS)
