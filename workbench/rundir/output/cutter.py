"""Cut lines and numbered events from the output of a rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from workbench.base.files import open_record
from workbench.rundir.events import MARK, Event, parse_event

_LONGEST_LINE = 1 << 20  # bytes of a line; the rest is left out, and an event is far shorter
_BLOCK_BYTES = 4 << 20
_LINE_OF_EVENT = f"\n{MARK}".encode()


class LineSplitter:
    """Split a stream of bytes into whole lines. The pieces do not change the lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Add a piece and yield its finished lines, decoded, without newlines."""
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest[:_LONGEST_LINE]
        for line in lines:
            yield line[:_LONGEST_LINE].decode("utf-8", errors="replace")

    def skip(self, data: bytes) -> int:
        """Add a piece and return the number of its finished event lines."""
        text = self._pending + data
        head, newline, rest = text.rpartition(b"\n")
        self._pending = rest[:_LONGEST_LINE]
        if not newline:
            return 0
        # Every line of the head, also the first, follows a newline.
        return (b"\n" + head).count(_LINE_OF_EVENT)


class EventCutter:
    """Cut the events from the standard output of a rank and number the events.

    The number of an event is the number of event lines before, from the beginning of the output.
    Lines that are no event after all have numbers too: every reader of the same output counts
    alike, and a rank cannot choose a number.
    """

    def __init__(
        self,
        rank: int,
        attempt: int,
        states: Collection[str],
        mask: Callable[[Mapping[str, object]], Mapping[str, object]] = dict,
    ) -> None:
        self._rank = rank
        self._attempt = attempt
        self._states = states
        self._mask = mask
        self._lines = LineSplitter()
        self.count = 0
        """Number of event lines so far."""

    def skip(self, data: bytes) -> None:
        """Count the event lines of a piece without a look at the events."""
        self.count += self._lines.skip(data)

    def feed(self, data: bytes) -> Iterator[Event]:
        """Add a piece and yield its finished events, in order."""
        for line in self._lines.feed(data):
            if not line.startswith(MARK):
                continue
            sequence = self.count
            self.count += 1
            event = parse_event(line, states=self._states)
            if event is not None:
                yield replace(
                    event,
                    data=self._mask(event.data),
                    printed_by=self._rank,
                    attempt=self._attempt,
                    sequence=sequence,
                )


def blocks_of(path: Path, root: Path) -> Iterator[bytes]:
    """Yield the content of a log below a run directory. Raise OSError on failure."""
    with open_record(path, root) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
