"""In which order a rank wrote to its two streams: a line for each change from one to the other, beside the logs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_MOST_BYTES = 4 << 20  # then the order of the rest is not kept


class OutputOrder:
    """The order of one rank's output: a line `stdout 1234` means that what came next, up to that byte, was of it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "order.log"
        self._lock = threading.Lock()
        self._last = ("", 0)

    @property
    def size(self) -> int:
        return size_of(self.log)

    def note(self, stream: str, end: int) -> None:
        """Take note that a stream has got as far as that byte; only a change of streams costs a line."""
        with self._lock:
            (before, at), self._last = self._last, (stream, end)
            if before in ("", stream):
                return
            try:
                file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError:
                return
            try:
                if os.fstat(file).st_size < _MOST_BYTES:
                    os.write(file, f"{before} {at}\n".encode())
            except OSError:  # a full disk: readers do without
                self._last = ("", 0)
            finally:
                os.close(file)

    def read(self, offset: int, count: int) -> bytes:
        return read_at(self.log, offset, count)


def size_of(path: Path) -> int:
    """Return the size of a log; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_at(path: Path, offset: int, count: int) -> bytes:
    """Return what a log holds from an offset on; nothing where it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(count) or b""
    except OSError:
        return b""
