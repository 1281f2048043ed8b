"""The states of a run, and the small files by which the keeper tells others how things stand.

A state file is replaced whole, never edited, so a reader sees the old one or the new one. A process is known by its
id and its start time together: ids come round again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

__all__ = ["RunState", "is_alive", "process_start_time", "read_json", "write_json"]


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


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Replace a JSON file atomically; a reader never sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(data, out, indent=1, default=str)
            out.write("\n")
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; a missing or broken file is an empty one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


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
