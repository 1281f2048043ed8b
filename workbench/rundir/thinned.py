"""Keep the events of a run without the steps and evaluations that no plot of the whole run shows.

The keeper writes `thinned.jsonl` beside `events.jsonl`. A reader takes that file and the events
behind it, so a look at a long run reads as much as a look at a short run. Totals are equal to those
of all events, and a plot of the whole run has the same points. Smoothing, a range of steps and
`run.events()` read all events.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.base.files import read_bytes, records
from workbench.base.json_values import as_float, as_int, get_object, try_record
from workbench.rundir.events import (
    Event,
    EventKind,
    EventTail,
    checked,
    event_of,
    read_events,
    recorded_line,
    records_in,
)
from workbench.rundir.figures.curves import MOST_SHOWN, Curve
from workbench.rundir.figures.metrics import numbers_in

logger = logging.getLogger(__name__)
_MOST_BYTES = 4 << 20  # a run with more events of other kinds has no thinned events
_COMPARED_BYTES = 4096
_MOST_EVENTS = 10_000  # in memory beside the kept events
_POINTS = 2 * MOST_SHOWN  # of a curve: a plot chooses its own points among them
_THINNED = (EventKind.STEP, EventKind.EVAL)


class ThinnedTail(EventTail):
    """Read the thinned events, then the events behind them; all events where none are thinned."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.offset, self._kept = _read(path)

    def read(self) -> Iterator[Event]:
        kept, self._kept = self._kept, []
        yield from kept
        yield from super().read()


class ThinnedWriter:
    """Write the thinned events of an `events.jsonl` that only this process appends to."""

    def __init__(self, path: Path):
        self._path = path
        self._tail: EventTail = ThinnedTail(path)
        self._kept: list[Event] = []
        self._is_full = False

    def renew(self, least_bytes: int) -> None:
        """Write the file if `least_bytes` of the events are new.

        Raise OSError if the file cannot be written.
        """
        new_bytes = records.size_of(self._path) - self._tail.offset
        if self._is_full or new_bytes < least_bytes:
            return
        new = list(self._tail.read())
        # The steps that a restart repeats hide no point of the steps before.
        if any(event.kind == EventKind.RESTARTED for event in new):
            self._begin_anew()
        else:
            self._kept = thin([*self._kept, *new], _restarts_in(self._kept))
        lines = "".join(map(recorded_line, self._kept)).encode()
        about = {
            "offset": self._tail.offset,
            "crc": _crc_before(self._path, self._tail.offset),
            "events": len(self._kept),
        }
        content = json.dumps(about).encode() + b"\n" + lines
        if len(content) <= _MOST_BYTES:
            records.write_bytes(thinned_beside(self._path), content)
            return
        logger.info("%s has too many events of other kinds to be thinned", self._path)
        thinned_beside(self._path).unlink(missing_ok=True)
        self._is_full = True
        self._kept = []

    def _begin_anew(self) -> None:
        """Thin all events again, for the steps at which the run was restarted."""
        restarts = _restarts_in(read_events(self._path))
        self._tail = EventTail(self._path)
        kept: list[Event] = []
        block: list[Event] = []
        for event in self._tail.read():
            block.append(event)
            if len(block) >= _MOST_EVENTS:
                kept = thin([*kept, *block], restarts)
                block = []
        self._kept = thin([*kept, *block], restarts)


class _Points:
    """The events with a figure among reports of rising steps."""

    def __init__(self, place: int):
        self.first = place
        self.last = place
        self._curve = Curve()
        self._places: list[int] = []

    def add(self, place: int, step: int, value: float | None) -> None:
        self.last = place
        if value is not None:
            self._curve.add(step, value)
            self._places.append(place)

    def kept(self) -> set[int]:
        """Return the places of the first, the last, and every event that a plot may show."""
        shown = {self._places[at] for at in self._curve.places(_POINTS)}
        return shown | {self.first, self.last}


def thin(events: Sequence[Event], restarts: Sequence[int]) -> list[Event]:
    """Return the events without steps and evaluations that no plot of the whole run shows.

    The first and the last event with every name stay, so totals do not change. Events that were
    thinned before may be thinned again with later ones.

    Args:
        events: Events from the beginning of the run.
        restarts: Steps from which the run continued, also after the events.

    Example:
        >>> steps = [Event(time_s=n, rank=0, kind="step", data={"step": n, "loss": -n % 977})
        ...     for n in range(100_000)]
        >>> 200 < len(thin(steps, [])) <= 802
        True
    """
    kept: set[int] = set()
    points: dict[tuple[object, ...], _Points] = {}
    last_steps: dict[tuple[str, int | None], int] = {}
    begun = 0
    later = list(restarts)
    for place, event in enumerate(events):
        step = event.whole("step")
        if event.kind == EventKind.RESTARTED:
            begun += 1
            if step is not None and later:
                del later[0]
        if event.kind not in _THINNED or step is None:
            kept.add(place)
            continue
        # A report of an earlier step may begin another training.
        line = (event.kind, event.rank)
        begun += step < last_steps.get(line, step)
        last_steps[line] = step
        # Points beyond the step of a later restart are in no plot.
        dropped = sum(step > continued for continued in later)
        for name, value in _values(event):
            key = (line, begun, dropped, name)
            if key not in points:
                points[key] = _Points(place)
            points[key].add(place, step, value)
    for each in points.values():
        kept |= each.kept()
    return [events[place] for place in sorted(kept)]


def _values(event: Event) -> Iterator[tuple[str, float | None]]:
    """Yield the names in an event, with the finite numbers that have a curve."""
    numbers = numbers_in(event)
    yield "", None  # an event may have no name
    for name in event.data:
        yield name, as_float(numbers.get(name))
    for name, value in get_object(event.data, "metrics").items():
        yield f"metrics.{name}", as_float(value)


def _restarts_in(events: Iterator[Event] | Sequence[Event]) -> list[int]:
    steps = [event.whole("step") for event in events if event.kind == EventKind.RESTARTED]
    return [step for step in steps if step is not None]


def thinned_beside(events: Path) -> Path:
    """Return the path of the thinned events of an `events.jsonl`."""
    return events.with_name("thinned.jsonl")


def _read(path: Path) -> tuple[int, list[Event]]:
    """Return the offset behind the thinned events, and the events.

    (0, []): the file is missing or damaged, or was written for other events.
    """
    try:
        about, *lines = read_bytes(thinned_beside(path), _MOST_BYTES).split(b"\n")
        whole = [content for line in lines if (content := checked(line)) is not None]
        events = [event for event in map(event_of, records_in(whole)) if event is not None]
        match try_record(about):
            case {"offset": offset, "crc": crc, "events": count} if count == len(events):
                place = as_int(offset)
                if place is not None and crc == _crc_before(path, place):
                    return place, events
    except (OSError, ValueError) as error:
        logger.debug("no thinned events beside %s: %s", path, error)
    return 0, []


def _crc_before(path: Path, offset: int) -> int | None:
    """Return a checksum of the last bytes before an offset. None: the file is shorter."""
    begin = max(0, offset - _COMPARED_BYTES)
    with records.open_record(path) as file:
        file.seek(begin)
        content = file.read(offset - begin)
    return zlib.crc32(content) if len(content) == offset - begin else None
