"""Turn the bytes of ranks' output files, read by offset, into local log files and events.

The local log is the byte-exact copy, so its size is the offset to read on from, after a break too. Where the disk is
full it ends early, and the run goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from workbench.rundir.events import MARK, Event, parse_event
from workbench.rundir.paths import RunPaths

__all__ = ["Collector", "LineSplitter"]

logger = logging.getLogger(__name__)
_LONGEST_LINE = 1 << 20  # bytes of an unfinished line kept in memory; an event is far shorter


class LineSplitter:
    """Cut a stream of bytes that arrives in pieces into whole lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Take a piece and yield the lines that it ends, decoded, without their newlines."""
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest if len(rest) <= _LONGEST_LINE else b""
        for line in lines:
            yield line.decode("utf-8", errors="replace")


class Collector:
    """Copy the output of the ranks of one pod into the run directory."""

    def __init__(self, paths: RunPaths, ranks: list[int]):
        self._files: dict[str, Path] = {
            f"rank-{rank}/{stream}.log": paths.rank_log(rank, stream)
            for rank in ranks
            for stream in ("stdout", "stderr")
        }
        self._splitters = {name: LineSplitter() for name in self._files if name.endswith("stdout.log")}
        self.cut: set[str] = set()
        """Files whose local copy ends early, because the disk was full."""
        for path in self._files.values():
            path.touch()
        self.offsets = {name: path.stat().st_size for name, path in self._files.items()}

    def take(self, chunks: Mapping[str, Mapping[str, object]]) -> list[Event]:
        """Append what the agent read and return the events in it."""
        events: list[Event] = []
        for name, chunk in chunks.items():
            if name not in self._files or chunk["offset"] != self.offsets[name]:
                continue  # a late answer from before a reconnection
            data = str(chunk["data"]).encode("latin-1")
            self._keep(name, data)
            self.offsets[name] += len(data)
            if name in self._splitters:
                lines = self._splitters[name].feed(data)
                events += [event for line in lines if line.startswith(MARK) and (event := parse_event(line))]
        return events

    def _keep(self, name: str, data: bytes) -> None:
        if name in self.cut:
            return
        path, size = self._files[name], self.offsets[name]
        try:
            with path.open("ab", buffering=0) as log:
                while data:
                    data = data[log.write(data) :]
        except OSError as error:
            logger.warning("%s ends here: %s", path, error)
            self.cut.add(name)
            with suppress(OSError):
                os.truncate(path, size)
