"""Find events that ranks printed and that a dead keeper did not write, by their numbers."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base.files import gate
from workbench.base.files.gate import open_to_write
from workbench.base.json_values import part, whole
from workbench.rundir.events import Event, EventKind, read_events
from workbench.rundir.output.cutter import EventCutter, LineSplitter, blocks_of
from workbench.rundir.paths import RunPaths

_BLOCK_BYTES = 1 << 16
PRINTED_BEFORE = "printed_before"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mended:
    """Events of a run directory."""

    written: Sequence[Event]
    """Events of the file, in order of writing."""
    missing: Sequence[Event]
    """Printed events that the file lacks, by time."""
    whole: bool
    """Whether every log could be read."""


def mend_events(paths: RunPaths, states: Collection[str]) -> Mended:
    """Find the missing events of a run. Remove an unfinished last line of the file first.

    Raise OSError if the file of events cannot be opened.

    Args:
        paths: Run directory.
        states: Kinds of state events that the ranks may send.
    """
    _end_at_last_line(paths)
    written = list(read_events(paths.events))
    matched = _Written(written)
    begins = events_before_restarts(written)
    missing: list[Event] = []
    is_whole = True
    for rank, log in _logs(paths):
        first_numbers = matched.first_numbers(rank, begins)
        # Written events have times of the local clock, printed events of the pod's clock.
        offset_s = 0.0
        of_rank: list[Event] = []
        try:
            all_printed = list(_printed(rank, log, paths.root, states))
        except OSError:  # no free descriptor, for example
            is_whole = False
            continue
        for printed in all_printed:
            sequence = printed.sequence or 0
            event = replace(printed, attempt=_attempt_of(sequence, first_numbers))
            written_s = matched.time_s(event)
            if written_s is None:
                of_rank.append(event)
            else:
                offset_s = event.time_s - written_s
        for event in of_rank:
            local_s = event.time_s - offset_s
            missing.append(replace(event, time_s=local_s))
    missing.sort(key=lambda event: event.time_s)
    return Mended(written=written, missing=missing, whole=is_whole)


def count_printed(paths: RunPaths) -> dict[str, int]:
    """Return the number of event lines in every rank's log, by rank, without unreadable logs."""
    counts = {}
    for rank, log in _logs(paths):
        lines = LineSplitter()
        with suppress(OSError):
            counts[str(rank)] = sum(lines.skip(block) for block in blocks_of(log, paths.root))
    return counts


def events_before_restarts(events: Sequence[Event]) -> list[Mapping[str, object]]:
    """Return the number of every rank's event lines before each restart, by rank."""
    begins = []
    for event in events:
        is_own = event.rank is None and event.printed_by is None
        if is_own and event.kind == EventKind.RESTARTED:
            begins.append(part(event.data, PRINTED_BEFORE))
    return begins


class _Written:
    """Events that are written already, matched one by one with printed events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._times_s: dict[tuple[int, int, int], float] = {}
        self._lowest: dict[tuple[int, int], int] = {}
        for event in events:
            if event.key is not None:
                output, attempt, sequence = event.key
                self._times_s[event.key] = event.time_s
                lowest = self._lowest.get((output, attempt), sequence)
                self._lowest[output, attempt] = min(lowest, sequence)

    def first_numbers(self, rank: int, begins: Sequence[Mapping[str, object]]) -> dict[int, int]:
        """Return the first number of a rank's events in every attempt, where known."""
        firsts: dict[int, int] = {}
        for attempt, before in enumerate(begins, start=1):
            first = whole(before.get(str(rank)))
            if first is not None:
                firsts[attempt] = first
        # An attempt begins no later than its first written event.
        for (output, attempt), lowest in self._lowest.items():
            if output == rank and attempt > 0:
                firsts[attempt] = min(lowest, firsts.get(attempt, lowest))
        return firsts

    def time_s(self, printed: Event) -> float | None:
        """Return the written time of a printed event. None: the event is not written."""
        key = printed.key
        return None if key is None else self._times_s.get(key)


def _attempt_of(sequence: int, first_numbers: Mapping[int, int]) -> int:
    """Return the attempt that printed the event of a number."""
    begun = [attempt for attempt, first in first_numbers.items() if first <= sequence]
    return max(begun, default=0)


def _end_at_last_line(paths: RunPaths) -> None:
    """Remove an unfinished last line from the events."""
    descriptor = open_to_write(paths.events, os.O_RDWR | os.O_CREAT, paths.root)
    with os.fdopen(descriptor, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            at = block.rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _logs(paths: RunPaths) -> Iterator[tuple[int, Path]]:
    """Yield the standard output of every rank, with the rank."""
    logs: list[Path] = []
    with suppress(OSError):
        logs = gate.files_in(paths.logs, "rank-*.stdout.log", paths.root)
    for log in logs:
        name, _, _ = log.name.partition(".")
        rank = name.removeprefix("rank-")
        if rank.isdecimal():
            yield int(rank), log


def _printed(rank: int, log: Path, root: Path, states: Collection[str]) -> Iterator[Event]:
    cutter = EventCutter(rank, 0, states)
    for block in blocks_of(log, root):
        yield from cutter.feed(block)
