"""Copy a rank's output from its pipe into its log, and read the log. A full disk loses no rank.

Without the pipe, a rank dies of the first line on a full disk. Output beyond the disk's room stays
in memory until there is room, and is read by offset as if in the file. Output beyond the memory
limit is dropped.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from workbench.agent.ranks.request import Message, whole_in
from workbench.base.files import open_record, records
from workbench.base.files.records import size_of
from workbench.base.messages.lines import widen
from workbench.base.process import output_pipe

_MOST_BYTES = 4 << 20  # the order of later output is not recorded
_log = logging.getLogger(__name__)
_KEPT_BYTES = 4 << 20  # per stream, while the disk is full
_PIPE_BYTES = 1 << 20
_TAIL_BYTES = 256 << 10
_AGAIN_S = 1.0
Chunk = dict[str, object]


class OutputOrder:
    """Order of a rank's output to its two streams: a line per change of streams, beside the logs.

    A line `stdout 1234` means: the output up to byte 1234 of stdout came next.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._lock = threading.Lock()
        self._last = ("", 0)

    @property
    def size(self) -> int:
        return size_of(self.log)

    def note(self, stream: str, end: int) -> None:
        """Record the end offset of a stream's output. Only a change of streams writes a line."""
        with self._lock:
            (before, at) = self._last
            self._last = (stream, end)
            if before in ("", stream):
                return
            try:
                with records.open_to_append(self.log) as file:
                    if os.fstat(file.fileno()).st_size < _MOST_BYTES:
                        file.write(f"{before} {at}\n".encode())
            except OSError:  # a full disk, or no file: readers work without the order
                self._last = ("", 0)

    def read(self, offset: int, count: int) -> bytes:
        return read_at(self.log, offset, count)


def read_at(path: Path, offset: int, count: int) -> bytes:
    """Return at most `count` bytes of a log from an offset; b"" if the log cannot be read."""
    try:
        with open_record(path) as file:
            file.seek(offset)
            return file.read(count)
    except OSError:
        return b""


class OutputStream:
    """A stream of a rank: pipe, log, and the bytes between the two."""

    def __init__(self, log: Path, name: str = "", order: OutputOrder | None = None) -> None:
        """Read a log. `name` is the name of the stream in the record of the order."""
        self.log = log
        self._name = name
        self._order = order
        self.dropped = 0
        """Number of bytes that fitted neither on the disk nor in memory."""
        self.pipe = -1
        """Reading end of the pipe; -1: no pipe is open."""
        self._path = output_pipe(log)
        self._file = -1
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._written = size_of(self.log)
        self._asked = 0
        self._gap = 0
        self._again_at = 0.0

    @property
    def size(self) -> int:
        if self.pipe < 0 and self._file < 0 and not self._kept:
            self._written = size_of(self.log)  # another process may write the log
        return self._written + len(self._kept)

    def open(self) -> None:
        """Create the pipe before the rank's start. Without a pipe the rank writes into the log."""
        self.close()
        self._written = size_of(self.log)
        self.dropped = 0
        try:
            self.log.touch(0o600)
            self._path.unlink(missing_ok=True)
            os.mkfifo(self._path, 0o600)
            self.pipe = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            # Held open from now on: output is not lost if the file or its folder is removed.
            self._file = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _log.warning("no pipe at %s: %s", self._path, error)
            return
        widen(self.pipe, _PIPE_BYTES)

    def drain(self) -> None:
        """Empty the pipe. Bytes written meanwhile may stay."""
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
        """Empty and close the pipe. Bytes in memory can still be read. Idempotent.

        A removed log stays open: its content exists nowhere else.
        """
        self.drain()
        with self._lock:
            if self.pipe >= 0:
                os.close(self.pipe)
                self._path.unlink(missing_ok=True)
            self.pipe = -1
            if self._file >= 0 and not self.removed:
                os.close(self._file)
                self._file = -1

    @property
    def removed(self) -> bool:
        """Whether the log was removed during the run."""
        if self._file < 0:
            return False
        try:
            return not os.path.samestat(os.fstat(self._file), self.log.stat())
        except OSError:
            return True

    def read(self, offset: int, count: int) -> bytes:
        """Return bytes from an offset. The reader has all bytes before the offset."""
        with self._lock:
            self._flush()
            self._asked = max(self._asked, min(offset, self.size))
            # The file has the bytes up to `_written`, memory has the rest.
            data = b""
            in_file = self._written - offset
            if in_file > 0:
                data = self._read(offset, min(count, in_file))
            at = max(offset + len(data), self._written) - self._written
            end = at + count - len(data)
            return data + bytes(self._kept[at:end])

    def _read(self, offset: int, count: int) -> bytes:
        if self._file < 0:
            return read_at(self.log, offset, count)
        try:
            return os.pread(self._file, count, offset)
        except OSError:
            return b""

    def tail(self) -> str:
        asked = self._asked  # reading the tail does not mean that the keeper has the bytes
        offset = max(0, self.size - _TAIL_BYTES)
        end = self.read(offset, _TAIL_BYTES)
        self._asked = asked
        return end.decode("utf-8", "replace")

    def _take(self, data: bytes) -> None:
        # The note of a gap comes before the data.
        if not self._kept and not self._gap:
            written = self._write(data)
            data = data[written:]
        room = _KEPT_BYTES - len(self._kept)
        # The keeper has these bytes: a hole in the file replaces them.
        if room < len(data) and self._asked > self._written:
            gone = min(self._asked - self._written, len(self._kept))
            del self._kept[:gone]
            self._written += gone
            room += gone
        if self._gap and room > len(data):
            self._kept += f"\n[{self._gap} bytes are lost here: the disk was full]\n".encode()
            self._gap = 0
        fits = 0
        if not self._gap:
            # The note of a gap may have taken more than the room.
            fits = max(0, min(room, len(data)))
        lost = len(data) - fits
        self._kept += data[:fits]
        self._gap += lost
        self.dropped += lost
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
                self._file = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while done < len(data):
                rest = data[done:]
                done += os.pwrite(self._file, rest, self._written + done)
        except OSError as error:
            if not self._kept:
                _log.warning("%s takes no more for now: %s", self.log, error)
            self._again_at = time.monotonic() + _AGAIN_S
        self._written += done
        return done


class OutputPump:
    def __init__(self) -> None:
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor that is readable after new output."""
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
                stream = self._streams.get(pipe)
                if stream is None:
                    continue
                try:
                    stream.drain()
                except Exception:  # thread boundary: the other ranks' output must continue
                    _log.exception("emptying the pipe of %s", stream.log)
                    time.sleep(_AGAIN_S)
                os.eventfd_write(self.news, 1)


Readable = OutputStream | OutputOrder


def has_output(streams: Mapping[str, Readable], offsets: Message) -> bool:
    """Whether a stream has bytes beyond the reader's offset."""
    return any(stream.size > whole_in(offsets, name, 0) for name, stream in streams.items())


def read_chunks(
    streams: Mapping[str, Readable], offsets: Message, max_bytes: int
) -> dict[str, Chunk]:
    """Read new output by offset. The limit keeps the agent fast and its memory small."""
    starts = {name: whole_in(offsets, name, 0) for name in streams}
    fresh = []
    for name, start in starts.items():
        new_bytes = streams[name].size - start
        if new_bytes > 0:
            fresh.append((new_bytes, name))
    chunks: dict[str, Chunk] = {}
    left = max_bytes
    streams_left = len(fresh)
    # The smallest stream first: the unused part of its share goes to the others.
    for _, name in sorted(fresh, key=lambda each: each[0]):
        share = left // streams_left
        data = streams[name].read(starts[name], share)
        left -= len(data)
        streams_left -= 1
        if data:
            chunks[name] = {"offset": starts[name], "data": data.decode("latin-1")}
    return chunks
