"""The lines by which a rank speaks: `@workbench ` and one JSON object.

Ranks print them among their own output; whoever reads a rank's stdout tells them from log text here. Nothing in
this module knows what the kinds mean.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["MARK", "Event", "emit", "format_event", "parse_event", "read_events"]

MARK = "@workbench "


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that a rank, or the keeper, said."""

    time_s: float
    """Seconds since 1970, by the clock of whoever said it."""
    rank: int | None
    """The rank; None for the keeper."""
    kind: str
    """What sort of thing: phase, start, step, eval, memory, end, …"""
    data: Mapping[str, object] = field(default_factory=dict)
    """The rest of the object."""

    def to_json(self) -> str:
        """Return the JSON object, without the mark."""
        return json.dumps({"time_s": round(self.time_s, 3), "rank": self.rank, "kind": self.kind, **self.data})


def format_event(kind: str, *, rank: int | None, **data: object) -> str:
    """Make the line for an event that happens now, without the newline."""
    return MARK + Event(time_s=time.time(), rank=rank, kind=kind, data=data).to_json()


def emit(kind: str, **data: object) -> None:
    """Print an event from inside a rank, in one write so that other output cannot cut it."""
    sys.stdout.flush()
    line = format_event(kind, rank=int(os.environ.get("RANK", "0")), **data)
    # A leading newline ends whatever progress bar stands half drawn on the line.
    os.write(1, f"\n{line}\n".encode())


def parse_event(line: str) -> Event | None:
    """Read one line of a rank's output.

    Example:
        >>> parse_event('@workbench {"time_s": 1.5, "rank": 0, "kind": "step", "loss": 2.0}').data["loss"]
        2.0
        >>> parse_event("Loading weights") is None
        True
    """
    if not line.startswith(MARK):
        return None
    try:
        raw = json.loads(line[len(MARK) :])
        return _from_dict(raw)
    except (ValueError, KeyError, TypeError):
        return None


def read_events(path: Path) -> Iterator[Event]:
    """Read an `events.jsonl`; a last line still being written is left out, a missing file has no events."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.endswith("\n"):
                return
            try:
                yield _from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue


def _from_dict(raw: dict[str, object]) -> Event:
    rest = {k: v for k, v in raw.items() if k not in ("time_s", "rank", "kind")}
    rank = raw["rank"]
    return Event(
        time_s=float(str(raw["time_s"])),
        rank=None if rank is None else int(str(rank)),
        kind=str(raw["kind"]),
        data=rest,
    )
