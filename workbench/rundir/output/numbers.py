"""Tell new events from known events by their numbers, and put late events in place. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.rundir.events import Event

Key = tuple[int, int, int]
"""Rank whose output has an event (-1: the keeper), attempt and sequence."""


class Numbers:
    """Set of whole numbers, kept as ranges. Memory grows with the gaps, not with the numbers.

    Example:
        >>> numbers = Numbers()
        >>> [numbers.add(number) for number in (0, 2, 1, 2)]
        [True, True, True, False]
        >>> numbers.highest
        2
    """

    def __init__(self) -> None:
        self._firsts = array("q")
        self._ends = array("q")  # the first number after a range

    @property
    def highest(self) -> int:
        """Highest number. -1: the set is empty."""
        return self._ends[-1] - 1 if self._ends else -1

    def add(self, number: int) -> bool:
        """Add a number. Return False if the set had the number already."""
        after = bisect_right(self._firsts, number)
        before = after - 1
        if before >= 0 and number < self._ends[before]:
            return False
        joins_before = before >= 0 and number == self._ends[before]
        joins_after = after < len(self._firsts) and number + 1 == self._firsts[after]
        if joins_before and joins_after:
            self._ends[before] = self._ends[after]
            del self._firsts[after]
            del self._ends[after]
        elif joins_before:
            self._ends[before] = number + 1
        elif joins_after:
            self._firsts[after] = number
        else:
            self._firsts.insert(after, number)
            self._ends.insert(after, number + 1)
        return True


class Arrivals:
    """Numbers of all events so far, by output and attempt."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], Numbers] = {}
        self._attempts: dict[int, int] = {}

    def take(self, event: Event) -> Event | None:
        """Return the event, marked if late. Return None for an event that was taken before.

        An event without numbers is always new.
        """
        key = event.key
        if key is None:
            return event
        output, attempt, sequence = key
        newest = self._attempts.get(output, attempt)
        numbers = self._numbers.setdefault((output, attempt), Numbers())
        late = attempt < newest or sequence < numbers.highest
        if not numbers.add(sequence):
            return None
        self._attempts[output] = max(attempt, newest)
        if late == event.late:
            return event
        return replace(event, late=late)


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events with every late event behind its predecessor in the same output.

    All other events keep their order. Events that were there before are left out.
    """
    arrivals = Arrivals()
    on_time: list[Event] = []
    late: list[tuple[Key, Event]] = []
    for event in events:
        arrived = arrivals.take(event)
        if arrived is None:
            continue
        if arrived.late and arrived.key is not None:
            late.append((arrived.key, replace(arrived, late=False)))
        else:
            on_time.append(arrived)
    if not late:
        return on_time
    # Numbers of the events in time, by output, with their places. Both grow together.
    numbers: dict[int, list[tuple[int, int]]] = {}
    places: dict[int, list[int]] = {}
    for place, event in enumerate(on_time):
        if event.key is not None:
            output, attempt, sequence = event.key
            numbers.setdefault(output, []).append((attempt, sequence))
            places.setdefault(output, []).append(place)
    # Late events by the place of their predecessor; -1: an event has no predecessor.
    behind: dict[int, list[Event]] = {}
    for key, event in sorted(late, key=lambda each: each[0]):
        output, attempt, sequence = key
        count = bisect_right(numbers[output], (attempt, sequence))
        place = places[output][count - 1] if count else -1
        behind.setdefault(place, []).append(event)
    ordered = behind.get(-1, [])
    for place, event in enumerate(on_time):
        ordered.append(event)
        ordered += behind.get(place, [])
    return ordered
