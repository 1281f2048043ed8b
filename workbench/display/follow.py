"""Draw a run's progress while someone waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from workbench.display.progress import ProgressLine
from workbench.runs.progress import Progress

__all__ = ["follow"]

# Working out the progress reads all events: it may take this part of the waiter's time, no more.
_SHARE = 0.05
_LEAST_S = 0.25


class _Followed(Protocol):
    @property
    def progress(self) -> Progress: ...


def follow(run: _Followed) -> Iterator[None]:
    """Draw the progress of a run until it has ended.

    Yields:
        Nothing, whenever the caller may sleep; it should do so for a fraction of a second.
    """
    with ProgressLine() as line:
        due = 0.0
        while True:
            began = time.monotonic()
            if began >= due:
                progress = run.progress
                line.update(progress)
                if progress.state.is_terminal:
                    return
                took = time.monotonic() - began
                due = began + max(_LEAST_S, took / _SHARE)
            yield
