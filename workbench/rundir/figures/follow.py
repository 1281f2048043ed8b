"""Draw how far a run, or the start of a cluster, is while someone waits for it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Protocol

from workbench.rundir.figures.line import ProgressLine
from workbench.rundir.figures.progress import Progress
from workbench.rundir.state import RunState

__all__ = ["follow", "follow_start"]

# Working out the progress reads all events: it may take this part of the waiter's time, no more.
_SHARE = 0.05
_LEAST_S = 0.25
_PATIENCE_S = 2.0  # a start that is over by then needs no words


class _Followed(Protocol):
    @property
    def progress(self) -> Progress: ...


def follow(run: _Followed) -> Iterator[None]:
    """Draw the progress of a run until it has ended."""
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


class _Started(Protocol):
    @property
    def message(self) -> str: ...


def follow_start(cluster: _Started) -> Generator[None, None, None]:
    """Draw what the start of a cluster waits for, once it takes long; close the iterator when it is over."""
    begun = time.monotonic()
    while time.monotonic() - begun < _PATIENCE_S:
        yield
    with ProgressLine() as line:
        while True:
            line.update(Progress(state=RunState.STARTING, message=cluster.message))
            yield
