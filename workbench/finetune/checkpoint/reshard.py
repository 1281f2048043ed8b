"""Make the rank's part of a checkpoint from the parts of another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.agent.rank import collectives as ranks


def resharded(trainer: Any, states: Sequence[Any]) -> Any:
    """Return the rank's part for its engine, from the parts of all ranks of the saved run."""
    return trainer.technique.resharded(trainer, states, rank=ranks.rank(), ranks=ranks.world_size())
