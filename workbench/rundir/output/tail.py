"""Read and follow the last lines of a log of any size."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from workbench.base.files import open_record
from workbench.base.redact import mask_secrets
from workbench.rundir.events import MARK
from workbench.rundir.paths import RunPaths

_T = TypeVar("_T")
# Maximum bytes of a read, and the first distance from the end of the log.
_WINDOW_BYTES = 64 << 10
# Maximum distance of the first read, if event lines fill the window.
_FURTHEST_BYTES = 1 << 20
_MOST_BYTES = 64 << 20  # maximum distance of the last lines from the end
_ENOUGH_LINES = 60
_KEPT_LINES = 400
_LONGEST_LINE = 2000
_TURN = re.compile(rb"^(stdout|stderr) (\d{1,19})$", re.MULTILINE)


def last_lines(path: Path, root: Path, most: int | None) -> list[str]:
    """Return the last `most` lines of a run's log, without event lines and blank lines.

    None: all lines. A log that is not there yet has no lines.
    """
    return [line for _, line in _lines_with_ends(path, root, most)]


def last_of_both(paths: RunPaths, rank: int, most: int | None) -> list[str]:
    """Return the last lines of both streams of a rank, in order of arrival where recorded."""
    logs = {}
    for name in ("stdout", "stderr"):
        log = paths.rank_log(rank, name)
        logs[name] = _lines_with_ends(log, paths.root, most)
    turns = _turns(paths.rank_log(rank, "order"), paths.root)
    merged: list[str] = []
    for name, end in turns:
        lines = logs[name]
        count = bisect_right(lines, end, key=lambda line: line[0])
        merged += [line for _, line in lines[:count]]
        del lines[:count]
    # Lines without a recorded order come last.
    for lines in logs.values():
        merged += [line for _, line in lines]
    return _last(merged, most)


def _last(lines: list[_T], most: int | None) -> list[_T]:
    """Return the last `most` entries. None: all entries."""
    if most is None:
        return lines
    first = max(0, len(lines) - most)
    return lines[first:]


def _turns(path: Path, root: Path) -> list[tuple[str, int]]:
    try:
        with open_record(path, within=root) as file:
            content = file.read(_MOST_BYTES)
    except OSError:  # the order is made with the first line
        return []
    turns = _TURN.findall(content)
    return [(stream.decode(), int(end)) for stream, end in turns]


def _lines_with_ends(path: Path, root: Path, most: int | None) -> list[tuple[int, str]]:
    furthest = None if most is None else _MOST_BYTES
    lines: list[tuple[int, str]] = []
    try:
        file = open_record(path, within=root)
    except FileNotFoundError:  # a log is made with its first line
        return lines
    with file:
        for start, data in _ends(file, furthest):
            lines = []
            end = start
            pieces = data.split(b"\n")
            for number, part in enumerate(pieces):
                end += len(part) + 1
                # The first line of a later start may be incomplete.
                if number == 0 and start > 0:
                    continue
                line = part.decode("utf-8", "replace")
                if line and not line.startswith(MARK):
                    lines.append((end, line))
            if most is not None and len(lines) >= most:
                break
    return _last(lines, most)


def _ends(file: BinaryIO, furthest: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield growing ends of a file with their start, up to `furthest` bytes.

    None: the whole file.
    """
    size = file.seek(0, os.SEEK_END)
    back = _WINDOW_BYTES
    while True:
        start = 0
        if furthest is not None:
            start = max(0, size - back)
        file.seek(start)
        data = file.read(size - start)
        yield start, data
        if furthest is None or start == 0 or back >= furthest:
            return
        back *= 4


class LogLines:
    """Read the lines of a log once each, without event lines and blank lines."""

    def __init__(self, path: Path, root: Path):
        self.path = path
        self._root = root
        self._offset = 0
        self._pending = b""

    def take(self, *, last: bool) -> Iterator[str]:
        """Yield the new whole lines. `last`: no more comes, so half a line is whole.

        Raise OSError for a log that cannot be read.
        """
        try:
            file = open_record(self.path, within=self._root)
        except FileNotFoundError:  # a log is made with its first line
            return
        with file:
            file.seek(self._offset)
            while data := file.read(_WINDOW_BYTES):
                self._offset += len(data)
                *lines, self._pending = (self._pending + data).split(b"\n")
                if len(self._pending) > _WINDOW_BYTES:  # a line without end comes in pieces
                    lines.append(self._pending)
                    self._pending = b""
                yield from _printed(lines)
        if last:
            yield from _printed([self._pending])
            self._pending = b""


def _printed(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        text = line.decode("utf-8", "replace")
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
            with open_record(self._path, within=self._path.parent.parent) as file:
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


def _shown(line: bytes) -> str:
    r"""Decode a line as a terminal does: a carriage return restarts the line."""
    _, _, last_drawn = line.rstrip(b"\r").rpartition(b"\r")
    shortened = last_drawn[:_LONGEST_LINE]
    text = shortened.decode("utf-8", errors="replace")
    return mask_secrets(text.rstrip())
