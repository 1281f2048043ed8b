"""Make this rank's part of a checkpoint from the parts of another number of ranks, as its technique cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.agent.rank import collectives as ranks


def resharded(trainer: Any, states: Sequence[Any]) -> Any:
    """Return what `capture` would call this rank's engine, from those of all ranks that saved one."""
    return trainer.technique.resharded(trainer, states, rank=ranks.rank(), ranks=ranks.world_size())
