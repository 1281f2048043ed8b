"""Draw how far a run is while someone waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from workbench.display.kit.line import ProgressLine
from workbench.rundir.figures.progress import Progress

# Working out the progress reads all events: it may take this part of the waiter's time, no more.
_SHARE = 0.05
_LEAST_S = 0.25


class _Followed(Protocol):
    @property
    def progress(self) -> Progress: ...


@contextmanager
def follow_run(run: _Followed) -> Iterator[Callable[[], None]]:
    """Draw the progress of a run; its last state when the waiting ends well."""
    due = 0.0

    def draw() -> None:
        nonlocal due
        began = time.monotonic()
        if began >= due:
            line.update(run.progress)
            due = began + max(_LEAST_S, (time.monotonic() - began) / _SHARE)

    with ProgressLine() as line:
        yield draw
        line.update(run.progress)
