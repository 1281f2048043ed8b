"""Lines of events as a rank prints them."""

from __future__ import annotations

from workbench.base.clock import now_s
from workbench.rundir.events import MARK, Event


def format_event(kind: str, *, rank: int | None, **data: object) -> str:
    """Return the line of an event with the current time, without the newline."""
    return MARK + Event(time_s=now_s(), rank=rank, kind=kind, data=data).to_json()
