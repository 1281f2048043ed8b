"""Follow files that only grow: events as they are appended, and the last lines of a log of any size."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from workbench.base.files import open_record
from workbench.base.json_values import items, parse_record
from workbench.base.redact import mask_secrets
from workbench.rundir.events import MARK, Event, event_of
from workbench.rundir.paths import RunPaths

_BLOCK_BYTES = 1 << 20
_WINDOW_BYTES = 64 << 10  # of a log: what one look reads at most, and how far back the first look goes at first
_FURTHEST_BYTES = 1 << 20  # where event lines fill the window, the first look goes back as far as this
_MOST_BYTES = 64 << 20  # how far back the last lines are looked for
_ENOUGH_LINES = 60
_KEPT_LINES = 400
_LONGEST_LINE = 2000
_LONGEST_EVENT = 1 << 20
_LONGEST_END = 20  # digits


class EventTail:
    """Read an `events.jsonl` from where the last look ended."""

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path = path
        self._offset = 0
        if last_bytes is not None and path.exists():
            self._offset = max(0, path.stat().st_size - last_bytes)

    def read(self) -> list[Event]:
        """Return the events since the last look; broken lines are left out."""
        events: list[Event] = []
        try:
            size = self._path.stat().st_size
            if size <= self._offset:
                return events
            with open_record(self._path) as file:
                file.seek(self._offset)
                rest = b""
                while block := file.read(_BLOCK_BYTES):
                    if len(rest) > _LONGEST_EVENT:
                        break  # not what a keeper writes
                    *lines, rest = (rest + block).split(b"\n")
                    events += _events(lines)
                self._offset = file.tell() - len(rest)
        except OSError:
            pass  # not there yet, or gone: what was read before stands
        return events


def last_lines(path: Path, root: Path, most: int | None) -> list[str]:
    """Return the last lines of a log of a run's directory, all where `most` is None, without event lines and blanks."""
    return [line for _, line in _lines_with_ends(path, root, most)]


def last_of_both(paths: RunPaths, rank: int, most: int | None) -> list[str]:
    """Return the last lines of a rank's two streams in the order in which they came, as far as that was kept."""
    logs = {name: _lines_with_ends(paths.rank_log(rank, name), paths.root, most) for name in ("stdout", "stderr")}
    merged: list[str] = []
    for name, end in [*_turns(paths.rank_log(rank, "order"), paths.root), ("stdout", None), ("stderr", None)]:
        lines = logs[name]
        count = len(lines) if end is None else bisect_right(lines, end, key=lambda line: line[0])
        merged += [line for _, line in lines[:count]]
        del lines[:count]
    return merged if most is None else merged[len(merged) - min(most, len(merged)) :]


def _turns(path: Path, root: Path) -> list[tuple[str, int]]:
    try:
        with open_record(path, within=root) as file:
            words = [line.split() for line in file.read(_MOST_BYTES).splitlines()]
    except OSError:  # of an earlier version
        return []
    return [
        (word[0].decode(), int(word[1]))
        for word in words
        if len(word) == 2 and word[0] in (b"stdout", b"stderr") and word[1].isdigit() and len(word[1]) < _LONGEST_END
    ]


def _lines_with_ends(path: Path, root: Path, most: int | None) -> list[tuple[int, str]]:
    back = None if most is None else _WINDOW_BYTES
    with open_record(path, within=root) as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = 0 if back is None else max(0, size - back)
            file.seek(start)
            parts = file.read(size - start).split(b"\n")
            ends = accumulate((len(part) + 1 for part in parts[1:]), initial=start + len(parts[0]) + 1)
            lines = [(end, part.decode("utf-8", "replace")) for end, part in zip(ends, parts, strict=True)]
            lines = lines if start == 0 else lines[1:]  # the first is the end of one
            lines = [(end, line) for end, line in lines if line and not line.startswith(MARK)]
            if back is None or start == 0 or len(lines) >= (most or 0) or back >= _MOST_BYTES:
                return lines if most is None else lines[len(lines) - min(most, len(lines)) :]
            back *= 4


class LogTail:
    """Keep the last lines of a log, without the event lines among them."""

    def __init__(self, path: Path):
        self.cut = False
        """Whether the log holds more than what is kept here."""
        self._path = path
        self._offset: int | None = None
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._pending = b""

    @property
    def lines(self) -> list[str]:
        """The last lines, oldest first; a bar half drawn is the last of them, as a terminal would show it."""
        live = _shown(self._pending)
        return [*self._kept, live] if live and not live.startswith(MARK) else list(self._kept)

    def refresh(self) -> bool:
        try:
            size = self._path.stat().st_size
            if size == (self._offset or 0):
                return False
            with open_record(self._path, within=self._path.parent.parent) as file:
                if self._offset is None:
                    self._first_look(file, size)
                else:
                    self._next_look(file, size)
        except OSError:
            return False
        return True

    def _first_look(self, file: BinaryIO, size: int) -> None:
        back = _WINDOW_BYTES
        while True:
            start = max(0, size - back)
            file.seek(start)
            data = file.read(size - start)
            self._kept.clear()
            self._pending = b""
            self._take(data, whole=start == 0)
            if start == 0 or len(self._kept) >= _ENOUGH_LINES or back >= _FURTHEST_BYTES:
                break
            back *= 4
        self._offset, self.cut = size, self.cut or start > 0

    def _next_look(self, file: BinaryIO, size: int) -> None:
        assert self._offset is not None
        start = max(self._offset, size - _WINDOW_BYTES)
        whole = start == self._offset
        if not whole:  # more came than anyone could read: the middle is in the file
            self._pending, self.cut = b"", True
        file.seek(start)
        data = file.read(size - start)
        self._take(data, whole=whole)
        self._offset = start + len(data)

    def _take(self, data: bytes, *, whole: bool) -> None:
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest[-_WINDOW_BYTES:]
        for line in lines if whole else lines[1:]:  # a window's first line is the end of one
            text = _shown(line)
            if text and not text.startswith(MARK):
                self.cut = self.cut or len(self._kept) == _KEPT_LINES
                self._kept.append(text)


def _shown(line: bytes) -> str:
    r"""Decode a line as a terminal shows it: a carriage return goes back to its start."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2][:_LONGEST_LINE]
    return mask_secrets(text.decode("utf-8", errors="replace").rstrip())


def _events(lines: list[bytes]) -> list[Event]:
    lines = [line for line in lines if line.strip()]
    try:
        # One call for all is twice as fast as one for each.
        raws = items(parse_record(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        raws = [_object(line) for line in lines]
    return [event for raw in raws if (event := event_of(raw))]


def _object(line: bytes) -> object:
    try:
        return parse_record(line)
    except ValueError:
        return None
