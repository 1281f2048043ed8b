"""Mend the events of a run whose keeper died: none is missing, and none stands there twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from workbench.rundir.events import MARK, Event, parse_event, read_events
from workbench.rundir.paths import RunPaths

_BLOCK_BYTES = 1 << 16


def mend_events(paths: RunPaths) -> list[Event]:
    """Add the events that ranks printed and the keeper did not come to write; return all."""
    end_at_last_line(paths.events)
    events = list(read_events(paths.events))
    by_rank = _by_rank(events)
    missing: list[Event] = []
    for rank, printed in _by_rank(_printed(paths)).items():
        written = by_rank.get(rank, [])
        last = len(written) - 1
        # What is written is by this machine's clock, what is printed by the pod's.
        offset_s = printed[last].time_s - written[last].time_s if 0 <= last < len(printed) else 0.0
        missing += [replace(event, time_s=event.time_s - offset_s) for event in printed[last + 1 :]]
    missing.sort(key=lambda event: event.time_s)
    with paths.events.open("a", encoding="utf-8") as out:
        out.writelines(event.to_json() + "\n" for event in missing)
    return events + missing


def end_at_last_line(path: Path) -> None:
    """Cut off the line that its writer did not come to end."""
    with path.open("a+b") as file:
        end = size = file.seek(0, 2)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    ranks: dict[int, list[Event]] = {}
    for event in events:
        if event.rank is not None:  # the keeper's own samples are in no log
            ranks.setdefault(event.rank, []).append(event)
    return ranks


def _printed(paths: RunPaths) -> Iterator[Event]:
    of_script = paths.script.exists()
    for log in sorted(paths.logs.glob("rank-*.stdout.log")):
        with log.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                whole = line.startswith(MARK) and line.endswith("\n")
                if whole and (event := parse_event(line[:-1], of_script=of_script)):
                    yield event
