"""Report a rank's current phase as events, with the progress of long phases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from workbench.agent.rank import collectives as ranks
from workbench.rundir.events import emit

T = TypeVar("T")
_EVERY_S = 1.0


def phase(name: str, **how_far: int) -> None:
    emit("phase", name=name, **how_far)


def counted(items: Iterable[T], total: int, name: str) -> Iterator[T]:
    """Yield the items. Rank 0 reports the number of finished batches once a second."""
    told_s = float("inf")
    if ranks.rank() == 0:
        told_s = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - told_s >= _EVERY_S:
            told_s = time.monotonic()
            phase(name, done=done, total=total)
        yield item
