"""What a rank writes, out of its pipe into its log: a full disk costs lines there, and not the rank.

A rank that writes into a file itself dies of the first line that finds no room. What a log cannot take stays in memory
until there is room, and is read by offset as if it were in the file; only what is more than that is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import threading
import time
from pathlib import Path

from workbench.base.process import OUTPUT_PIPE
from workbench.worker.agent.ranks.order import OutputOrder, read_at, size_of

_log = logging.getLogger(__name__)

_KEPT_BYTES = 4 << 20  # for each stream, while its disk is full
_PIPE_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10
_AGAIN_S = 1.0


class OutputStream:
    """One stream of one rank: its pipe, its log, and what is between them."""

    def __init__(self, folder: Path, name: str, order: OutputOrder | None = None) -> None:
        self.log = folder / f"{name}.log"
        self._name, self._order = name, order
        self.dropped = 0
        """Bytes that neither the disk nor the memory could take."""
        self.pipe = -1
        """The reading end; -1 while there is none."""
        self._path = folder / OUTPUT_PIPE.format(name)
        self._file = -1
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._written = size_of(self.log)
        self._asked = self._gap = 0
        self._again_at = 0.0

    @property
    def size(self) -> int:
        if self.pipe < 0 and not self._kept:
            self._written = size_of(self.log)  # another may write it
        return self._written + len(self._kept)

    def open(self) -> None:
        """Make the pipe, for a rank that is about to start; where none can be made, it writes into the file itself."""
        self.close()
        with contextlib.suppress(OSError):
            self.log.touch(0o600)
        self._written, self.dropped = size_of(self.log), 0
        try:
            self._path.unlink(missing_ok=True)
            os.mkfifo(self._path, 0o600)
            self.pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            _log.warning("no pipe at %s: %s", self._path, error)
            return
        with contextlib.suppress(OSError):  # the user's pipes may have taken all that is allowed
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def drain(self) -> None:
        """Empty the pipe; what is written meanwhile may stay."""
        with self._lock:
            for _ in range(_PIPE_BYTES >> 16):
                try:
                    data = os.read(self.pipe, _PIPE_BYTES) if self.pipe >= 0 else b""
                except BlockingIOError:
                    break
                if not data:
                    break
                self._take(data)
            self._flush()

    def close(self) -> None:
        """Close the pipe, after a last look into it; what is in memory can still be read. Idempotent."""
        self.drain()
        with self._lock:
            for opened in (self.pipe, self._file):
                if opened >= 0:
                    os.close(opened)
            if self.pipe >= 0:
                self._path.unlink(missing_ok=True)
            self.pipe = self._file = -1

    def read(self, offset: int, count: int) -> bytes:
        """Return what is there from an offset on; whoever asks has what is before it."""
        with self._lock:
            self._flush()
            self._asked = max(self._asked, min(offset, self.size))
            data = read_at(self.log, offset, min(count, self._written - offset)) if offset < self._written else b""
            at = max(offset + len(data), self._written) - self._written
            return data + bytes(self._kept[at : at + count - len(data)])

    def tail(self) -> str:
        asked = self._asked  # this look says nothing of what the keeper has
        end = self.read(max(0, self.size - _TAIL_BYTES), _TAIL_BYTES)
        self._asked = asked
        return end.decode("utf-8", "replace")

    def _take(self, data: bytes) -> None:
        if not self._kept:
            data = data[self._write(data) :]
        room = _KEPT_BYTES - len(self._kept)
        if room < len(data) and self._asked > self._written:  # the keeper has these; a hole in the file stands for them
            gone = min(self._asked - self._written, len(self._kept))
            del self._kept[:gone]
            self._written += gone
            room += gone
        if self._gap and room > len(data):
            self._kept += f"\n[{self._gap} bytes are lost here: the disk was full]\n".encode()
            self._gap = 0
        fits = 0 if self._gap else min(room, len(data))
        self._kept += data[:fits]
        self._gap += len(data) - fits
        self.dropped += len(data) - fits
        if self._order is not None:
            self._order.note(self._name, self._written + len(self._kept))

    def _flush(self) -> None:
        if self._kept and time.monotonic() >= self._again_at:
            written = self._write(bytes(self._kept))
            del self._kept[:written]

    def _write(self, data: bytes) -> int:
        done = 0
        try:
            if self._file < 0:
                self._file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._written + done)
        except OSError as error:
            if not self._kept:
                _log.warning("%s takes no more for now: %s", self.log, error)
            self._again_at = time.monotonic() + _AGAIN_S
        self._written += done
        return done


class OutputPump:
    def __init__(self) -> None:
        self._streams: dict[int, OutputStream] = {}
        self._poll = select.epoll()
        self._thread: threading.Thread | None = None

    def add(self, stream: OutputStream) -> None:
        stream.open()
        if stream.pipe < 0:
            return
        self._streams[stream.pipe] = stream
        self._poll.register(stream.pipe, select.EPOLLIN)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="output", daemon=True)
            self._thread.start()

    def remove(self, stream: OutputStream) -> None:
        if self._streams.pop(stream.pipe, None) is not None:
            self._poll.unregister(stream.pipe)
        stream.close()

    def _loop(self) -> None:
        while True:
            for pipe, _ in self._poll.poll(_AGAIN_S):
                if (stream := self._streams.get(pipe)) is not None:
                    try:
                        stream.drain()
                    except Exception:  # thread boundary: the other ranks' output must go on
                        _log.exception("emptying the pipe of %s", stream.log)
                        time.sleep(_AGAIN_S)
