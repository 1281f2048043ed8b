"""The states of a run."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    QUEUED = "queued"
    """Submitted; another run of the cluster goes first."""
    STARTING = "starting"
    """Inputs travel and ranks start; no optimizer step yet, or no rank of a script."""
    RUNNING = "running"
    """Ranks train; a script's ranks run."""
    SUCCEEDED = "succeeded"
    """Every rank left its done-record."""
    FAILED = "failed"
    """A rank, a pod or the launcher failed; the result says which."""
    STOPPED = "stopped"
    """It was asked to stop, and all ranks ended by themselves: a trainer saved its model and a checkpoint."""
    CANCELLED = "cancelled"
    """It was ended at once, or before it started; or a rank that was asked to stop had to be killed."""
    LOST = "lost"
    """Its keeper died before it ended, and no other has taken over; its ranks end when the agents' lease runs out."""

    UNKNOWN = "unknown"
    """Its files cannot be read at this moment, so that nobody can say; it may well continue."""

    @property
    def is_terminal(self) -> bool:
        return self not in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN)
