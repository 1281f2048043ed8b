"""Cut lines and events from the output of a rank, with their offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from workbench.base.redact import Redactor
from workbench.rundir.events import Event, parse_event

_LONGEST_LINE = 1 << 20  # bytes of a line; the rest is left out, and an event is far shorter


class LineSplitter:
    """Split a stream of bytes into whole lines. The pieces do not change the lines."""

    def __init__(self, offset: int = 0, unfinished: bytes = b"") -> None:
        """Begin with an unfinished line at an offset of the stream."""
        self._offset = offset
        self._pending = unfinished
        self._left_out = 0  # bytes of the unfinished line

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """Add a piece. Return its finished lines, decoded, without newlines, with their offsets."""
        *lines, rest = (self._pending + data).split(b"\n")
        found = []
        for line in lines:
            text = line[:_LONGEST_LINE].decode("utf-8", errors="replace")
            found.append((self._offset, text))
            self._offset += len(line) + self._left_out + 1
            self._left_out = 0
        self._pending = rest[:_LONGEST_LINE]
        self._left_out += len(rest) - len(self._pending)
        return found


class EventCutter:
    """Cut the events from the standard output of a rank.

    An event has the number of the attempt, and the offset of its line in the output of the
    attempt. A rank cannot choose them, and every reader of the same output finds the same.
    """

    def __init__(
        self,
        rank: int,
        attempt: int,
        states: Collection[str],
        redact: Redactor | None = None,
        *,
        lines: LineSplitter | None = None,
    ) -> None:
        self._rank = rank
        self._attempt = attempt
        self._states = states
        self._redact = redact
        self._lines = lines or LineSplitter()

    def feed(self, data: bytes) -> Iterator[Event]:
        """Add a piece and yield its finished events, in order."""
        for offset, line in self._lines.feed(data):
            event = parse_event(line, states=self._states)
            if event is not None:
                yield replace(
                    event,
                    data=self._redact.json(event.data) if self._redact else dict(event.data),
                    printed_by=self._rank,
                    attempt=self._attempt,
                    offset=offset,
                )
