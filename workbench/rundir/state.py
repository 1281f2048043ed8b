"""The states of a run, and the small files by which the keeper tells others how things stand.

A state file is replaced whole, never edited, so a reader sees the old one or the new one. A process is known by its
id and its start time together: ids come round again.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

__all__ = ["RunState", "is_alive", "process_start_time"]


class RunState(StrEnum):
    """Where a run is in its life."""

    QUEUED = "queued"
    """Submitted; another run of the cluster goes first."""
    STARTING = "starting"
    """Inputs travel and ranks start; no optimizer step yet."""
    RUNNING = "running"
    """Ranks train."""
    SUCCEEDED = "succeeded"
    """Every rank left its done-record."""
    FAILED = "failed"
    """A rank, a pod or the launcher failed; the result says which."""
    CANCELLED = "cancelled"
    """It was asked to stop."""
    LOST = "lost"
    """Its keeper died before it ended; the agents end its ranks when their lease runs out."""

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended."""
        return self not in (RunState.QUEUED, RunState.STARTING, RunState.RUNNING)


def process_start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, or None where it is gone (or there is no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not looked yet.
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, start_time: int | None) -> bool:
    """Whether the very process that had this id and start time still runs."""
    if start_time is None:  # no /proc on this system: the id alone must do
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    return process_start_time(pid) == start_time
