"""Read and follow the last lines of a log of any size."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from workbench.base.files.records import size_of
from workbench.base.redact import mask_secrets
from workbench.rundir.events import MARK
from workbench.rundir.output.attempts import attempts_in, open_log
from workbench.rundir.paths import RunPaths

_T = TypeVar("_T")
# Maximum bytes of a read, and the first distance from the end of the log.
_WINDOW_BYTES = 64 << 10
# Maximum distance of the first read, if event lines fill the window.
_FURTHEST_BYTES = 1 << 20
_MOST_BYTES = 8 << 20  # of a record of the order, which an agent ends at 4 MiB
_ENOUGH_LINES = 60
_KEPT_LINES = 400
_LONGEST_LINE = 2000
_TURN = re.compile(rb"^(stdout|stderr) (\d{1,19})$", re.MULTILINE)


def read_logs(
    paths: RunPaths, rank: int, streams: Sequence[str], most: int | None, limit: int
) -> tuple[dict[int, list[str]], int]:
    """Read the last lines of a rank, without event lines and blank lines.

    Raise OSError for a log that cannot be read. A log that is not there yet has no lines.

    Args:
        paths: Run directory.
        rank: Number of the rank.
        streams: Names of streams. The lines of several are in order of arrival where recorded.
        most: Number of lines. None: all lines.
        limit: Number of bytes to read.

    Returns:
        The lines by attempt, oldest first, and the number of older bytes beyond the limit.
    """
    by_attempt: dict[int, list[str]] = {}
    left_out = 0
    for attempt in reversed(attempts_in(paths)):
        wanted = None if most is None else most - sum(map(len, by_attempt.values()))
        if wanted is not None and wanted <= 0:
            break
        logs: dict[str, list[tuple[int, str]]] = {name: [] for name in streams}
        # Of two attempts, the older one is left out first.
        limit = 0 if left_out else limit
        files = {name: paths.rank_log(attempt, rank, name) for name in streams}
        # The smallest stream first: the unused part of its share goes to the others.
        for number, name in enumerate(sorted(streams, key=lambda name: size_of(files[name]))):
            share = limit // (len(streams) - number)
            logs[name], read, unread = _lines_with_ends(files[name], wanted, share)
            limit -= read
            left_out += unread
        turns = _turns(paths.rank_log(attempt, rank, "order"))
        by_attempt[attempt] = _last(_merged(logs, turns), wanted)
    return dict(reversed(by_attempt.items())), left_out


def _merged(
    logs: Mapping[str, list[tuple[int, str]]], turns: Sequence[tuple[str, int]]
) -> list[str]:
    """Join the lines of streams by their turns. Lines without a recorded order come last."""
    merged: list[str] = []
    for name, end in turns:
        lines = logs.get(name, [])
        count = bisect_right(lines, end, key=lambda line: line[0])
        merged += [line for _, line in lines[:count]]
        del lines[:count]
    for lines in logs.values():
        merged += [line for _, line in lines]
    return merged


def _last(lines: list[_T], most: int | None) -> list[_T]:
    """Return the last `most` entries. None: all entries."""
    if most is None:
        return lines
    first = max(0, len(lines) - most)
    return lines[first:]


def _turns(path: Path) -> list[tuple[str, int]]:
    try:
        with open_log(path) as file:
            content = file.read(_MOST_BYTES)
    except OSError:  # the order is made with the first line
        return []
    turns = _TURN.findall(content)
    return [(stream.decode(), int(end)) for stream, end in turns]


def _lines_with_ends(
    path: Path, most: int | None, limit: int
) -> tuple[list[tuple[int, str]], int, int]:
    """Return the last lines with their ends, the bytes read, and the bytes beyond the limit."""
    lines: list[tuple[int, str]] = []
    start, data = 0, b""
    try:
        file = open_log(path)
    except FileNotFoundError:  # a log is made with its first line
        return lines, 0, 0
    is_enough = False
    with file:
        for start, data in _ends(file, limit):
            lines = []
            end = start
            pieces = data.split(b"\n")
            for number, part in enumerate(pieces):
                end += len(part) + 1
                # The first line of a later start may be incomplete.
                if number == 0 and start > 0:
                    continue
                line = _drawn(part).decode("utf-8", "replace")
                if line and not line.startswith(MARK):
                    lines.append((end, line))
            is_enough = most is not None and len(lines) >= most
            if is_enough:
                break
    return _last(lines, most), len(data), 0 if is_enough else start


def _ends(file: BinaryIO, furthest: int) -> Iterator[tuple[int, bytes]]:
    """Yield growing ends of a file with their start, up to `furthest` bytes."""
    size = file.seek(0, os.SEEK_END)
    back = _WINDOW_BYTES
    while True:
        start = max(0, size - min(back, furthest))
        file.seek(start)
        data = file.read(size - start)
        yield start, data
        if start == 0 or back >= furthest:
            return
        back *= 4


class LogLines:
    """Read the lines of a log once each, without event lines and blank lines."""

    def __init__(self, path: Path):
        self.path = path
        self._offset = 0
        self._pending = b""

    def take(self, *, last: bool) -> Iterator[str]:
        """Yield the new whole lines. `last`: no more comes, so half a line is whole.

        Raise OSError for a log that cannot be read.
        """
        try:
            file = open_log(self.path)
        except FileNotFoundError:  # a log is made with its first line
            return
        with file:
            file.seek(self._offset)
            while data := file.read(_WINDOW_BYTES):
                self._offset += len(data)
                *lines, self._pending = (self._pending + data).split(b"\n")
                if len(self._pending) > _WINDOW_BYTES:
                    # Only the last state of a progress bar counts.
                    begin = self._pending.rstrip(b"\r").rfind(b"\r") + 1
                    self._pending = self._pending[begin:]
                if len(self._pending) > _WINDOW_BYTES:  # a line without end comes in pieces
                    lines.append(self._pending)
                    self._pending = b""
                yield from _printed(lines)
        if last:
            yield from _printed([self._pending])
            self._pending = b""


def _printed(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        text = _drawn(line).decode("utf-8", "replace")
        if text and not text.startswith(MARK):
            yield text


class LogTail:
    """Keep the last lines of a log, without the event lines among them."""

    def __init__(self, path: Path):
        self._path = path
        self._offset: int | None = None
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._pending = b""

    @property
    def lines(self) -> list[str]:
        """Last lines, oldest first.

        A half-drawn progress bar is the last line, as in a terminal.
        """
        lines = list(self._kept)
        live = _shown(self._pending)
        if live and not live.startswith(MARK):
            lines.append(live)
        return lines

    def refresh(self) -> bool:
        try:
            size = self._path.stat().st_size
            if size == (self._offset or 0):
                return False
            with open_log(self._path) as file:
                if self._offset is None:
                    self._first_look(file)
                else:
                    self._next_look(file, self._offset, size)
        except OSError:
            return False
        return True

    def _first_look(self, file: BinaryIO) -> None:
        for start, data in _ends(file, _FURTHEST_BYTES):
            self._kept.clear()
            self._pending = b""
            self._take(data, whole=start == 0)
            self._offset = start + len(data)
            if len(self._kept) >= _ENOUGH_LINES:
                break

    def _next_look(self, file: BinaryIO, offset: int, size: int) -> None:
        start = max(offset, size - _WINDOW_BYTES)
        if start > offset:  # too much new output: skip the middle, which stays in the file
            self._pending = b""
        file.seek(start)
        data = file.read(size - start)
        self._take(data, whole=start == offset)
        self._offset = start + len(data)

    def _take(self, data: bytes, *, whole: bool) -> None:
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest[-_WINDOW_BYTES:]
        # The first line of a window may be incomplete.
        if not whole:
            lines = lines[1:]
        for line in lines:
            text = _shown(line)
            if text and not text.startswith(MARK):
                self._kept.append(text)


def _drawn(line: bytes) -> bytes:
    """Return a line as a terminal shows it: a carriage return restarts the line."""
    _, _, last_drawn = line.rstrip(b"\r").rpartition(b"\r")
    return last_drawn


def _shown(line: bytes) -> str:
    shortened = _drawn(line)[:_LONGEST_LINE]
    text = shortened.decode("utf-8", errors="replace")
    return mask_secrets(text.rstrip())
