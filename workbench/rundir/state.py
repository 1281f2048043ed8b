"""Define the states of a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

StateName = Literal[
    "queued",
    "starting",
    "running",
    "succeeded",
    "failed",
    "stopped",
    "cancelled",
    "lost",
    "unknown",
]
"""Names of `RunState`, for editors."""


class RunState(StrEnum):
    QUEUED = "queued"
    """Submitted and waiting for another run of the cluster."""
    STARTING = "starting"
    """Inputs are sent and ranks start.

    There was no optimizer step yet, or no rank of a script runs yet.
    """
    RUNNING = "running"
    """Ranks train; a script's ranks run."""
    SUCCEEDED = "succeeded"
    """Every rank wrote its done-record."""
    FAILED = "failed"
    """A rank, a pod or the launcher failed; the result names the cause."""
    STOPPED = "stopped"
    """Stopped on request: all ranks ended by themselves.

    A trainer saved its model and a checkpoint.
    """
    CANCELLED = "cancelled"
    """Ended at once or before the start; or a rank had to be killed after a request to stop."""
    LOST = "lost"
    """The keeper died before the end of the run, and no other keeper has taken over.

    The ranks end when the agents' lease runs out.
    """

    UNKNOWN = "unknown"
    """The run's files cannot be read at the moment. The run may still continue."""

    @property
    def is_terminal(self) -> bool:
        return self not in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN)
