"""`RunPlot`: a curve of a run that can be asked: values under the pointer, zoom, log, steps or time, smoothing."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.shown import ShownLive

__all__ = ["PLOTS", "RunPlot"]

PLOTS = ("loss", "perplexity", "learning_rate", "grad_norm", "samples_per_s", "memory")


@dataclass(frozen=True, slots=True)
class RunPlot(ShownLive):
    """One plot of a run. A cell that ends with it shows it, and follows the run until that has ended."""

    path: Path
    """The run directory."""
    name: str = "loss"

    def __post_init__(self) -> None:
        if self.name not in PLOTS:
            near = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(self.name, PLOTS, n=1))
            raise ConfigError(f"plot takes one of {', '.join(PLOTS)}, and was given {self.name!r}{near}")
