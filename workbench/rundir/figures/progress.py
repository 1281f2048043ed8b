"""`Progress`: how far a run is."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.rundir.state import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is. What is not known yet is None."""

    state: RunState
    message: str = ""
    step: int | None = None
    """Optimizer steps taken."""
    max_steps: int | None = None
    epoch: float | None = None
    """Passes over the rows."""
    loss: float | None = None
    """Training loss at the last step."""
    eval_loss: float | None = None
    samples_per_s: float | None = None
    """Rows a second over all training steps so far, all ranks together."""
    eta_s: float | None = None
    """Seconds until the last step, at the pace so far."""
