"""The runs that a cluster's keeper was handed, in order: what another keeper goes on with where it died."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.files import write_text

__all__ = ["QueuedRun", "read_queue", "write_queue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedRun:
    """One run that was handed over; its own directory says how far it is."""

    id: str
    path: Path


_RUNS = TypeAdapter(list[QueuedRun])


def read_queue(path: Path) -> list[QueuedRun]:
    """Read the runs; none where there is no such file, or a broken one."""
    try:
        return _RUNS.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return []


def write_queue(path: Path, runs: Sequence[QueuedRun]) -> None:
    """Replace the file."""
    write_text(path, json.dumps([{"id": run.id, "path": str(run.path)} for run in runs], indent=1) + "\n")
