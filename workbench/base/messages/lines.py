"""Messages between processes: a JSON object per line, over any two byte streams."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workbench.base.json_values import parse_json

LARGEST = 16 << 20
"""Maximum bytes of a request, and of an answer unless a client expects longer answers."""

_READ_BYTES = 1 << 16


class TooLong(ValueError):
    """A line has more bytes than are accepted."""


def to_line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes | bytearray | str) -> dict[str, Any]:
    """Read a JSON object from a line. ValueError for any other content."""
    try:
        message = parse_json(line)
    except ValueError as error:
        raise ValueError(f"not a JSON object: {line[:80]!r} ({error})") from error
    if not isinstance(message, dict):
        raise ValueError(f"not a JSON object: {line[:80]!r}")
    return message


def check_length(size: int, what: str) -> None:
    """Raise TooLong for a message too long for the receiver."""
    if size > LARGEST:
        raise TooLong(f"{what} has {size >> 10} KiB; at most {LARGEST >> 10} KiB are accepted")


class Stream(Protocol):
    """Bytes in both directions. Errors are OSError."""

    def read(self, timeout_s: float | None) -> bytes:
        """Return some bytes, or none at the end of the stream. TimeoutError: none came in time."""

    def write(self, data: bytes) -> None:
        """Write all bytes."""

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that are readable when the stream has news."""


class Pipes:
    """Two descriptors of the caller: a child's pipes, or a socket twice."""

    def __init__(self, read: int, write: int, *, write_s: float | None = None) -> None:
        self._read = read
        self._write = write
        self._write_s = write_s
        os.set_blocking(read, False)
        os.set_blocking(write, False)

    def read(self, timeout_s: float | None) -> bytes:
        _await(self._read, select.POLLIN, timeout_s)
        return os.read(self._read, _READ_BYTES)

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        end_s = deadline(self._write_s)
        while rest:
            _await(self._write, select.POLLOUT, remaining(end_s))
            rest = rest[os.write(self._write, rest[:_READ_BYTES]) :]

    def descriptors(self) -> Sequence[int]:
        return [self._read]


class Lines:
    """Bytes as they arrive, cut into lines of bounded length."""

    def __init__(self, limit: int = LARGEST) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._searched = 0

    @property
    def is_cut(self) -> bool:
        """Whether the last bytes have no line end yet."""
        return bool(self._rest)

    def feed(self, data: bytes) -> None:
        self._rest += data

    def take(self) -> bytes | None:
        """Return the next line without its line end, or None until a line is complete."""
        end = self._rest.find(b"\n", self._searched)
        if (len(self._rest) if end < 0 else end) > self._limit:
            raise TooLong(f"a message of more than {self._limit} bytes is not accepted")
        if end < 0:
            self._searched = len(self._rest)
            return None
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        self._searched = 0
        return line


def widen(pipe: int, size: int) -> None:
    """Let a pipe hold more bytes, if the user's pipes have not taken all that is allowed."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)


def send_if_open(descriptor: int, data: bytes) -> None:
    """Write bytes once. A peer that has gone or reads nothing is no error."""
    with contextlib.suppress(OSError):
        os.write(descriptor, data)


def deadline(timeout_s: float | None) -> float | None:
    """Return the deadline on `time.monotonic` after `timeout_s` seconds; None for no limit."""
    return None if timeout_s is None else time.monotonic() + timeout_s


def remaining(end_s: float | None) -> float | None:
    """Return the seconds until a deadline, at least 0; None for no deadline."""
    return None if end_s is None else max(0.0, end_s - time.monotonic())


def _await(descriptor: int, event: int, timeout_s: float | None) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
        raise TimeoutError("timed out")
