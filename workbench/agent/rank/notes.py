"""Notes of the ranks for the user."""

from __future__ import annotations

from workbench.agent.rank import collectives as ranks
from workbench.rundir.events import emit


def note(message: str) -> None:
    """Emit a message for the user, from rank 0."""
    if ranks.rank() == 0:
        emit("note", message=message)
