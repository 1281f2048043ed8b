"""`RunPlot`: one plot of a run's curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import one_of
from workbench.base.shown import ShownLive

PLOTS = ("loss", "perplexity", "learning_rate", "grad_norm", "samples_per_s", "memory")


@dataclass(frozen=True, slots=True)
class RunPlot(ShownLive):
    """One plot of a run. A cell that ends with it shows it, and follows the run until that has ended."""

    path: Path
    """The run directory."""
    name: str = "loss"

    def __post_init__(self) -> None:
        if self.name not in PLOTS:
            raise one_of("plot", self.name, PLOTS)
