"""Find events that ranks printed and that a dead keeper did not write."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from workbench.rundir.events import Event
from workbench.rundir.output.attempts import attempts_in, open_log, rank_logs
from workbench.rundir.output.cutter import EventCutter, LineSplitter
from workbench.rundir.paths import RunPaths

_BLOCK_BYTES = 4 << 20


def missing_events(
    paths: RunPaths, written: Sequence[Event], states: Collection[str]
) -> list[Event]:
    """Return the printed events that are not written, attempt by attempt.

    The events of a rank are in the order of its output. Events of several ranks are by time.
    Raise OSError if a log cannot be read.

    Args:
        paths: Run directory.
        written: Events of the file. Every rank's events are there up to the last.
        states: Kinds of state events that the ranks may send.
    """
    last = {(event.attempt, event.output): event for event in written}
    missing: list[Event] = []
    for attempt in attempts_in(paths):
        of_ranks = []
        for rank, log in rank_logs(paths, attempt, "stdout"):
            before = last.get((attempt, rank))
            offset = (before and before.offset) or 0
            cutter = EventCutter(rank, attempt, states, lines=LineSplitter(offset))
            printed = list(_printed(log, offset, cutter))
            of_ranks.append(_behind(before, printed))
        missing += heapq.merge(*of_ranks, key=attrgetter("time_s"))
    return missing


def _behind(last: Event | None, printed: Sequence[Event]) -> Sequence[Event]:
    """Return the printed events behind the last written event, with times of its clock."""
    if last is None or not printed or printed[0].offset != last.offset:
        return printed
    # Written events have times of the local clock, printed events of the pod's clock.
    offset_s = printed[0].time_s - last.time_s
    return [replace(event, time_s=event.time_s - offset_s) for event in printed[1:]]


def _printed(log: Path, offset: int, cutter: EventCutter) -> Iterator[Event]:
    with open_log(log) as file:
        file.seek(offset)
        while block := file.read(_BLOCK_BYTES):
            yield from cutter.feed(block)
