"""JSON objects, each on a line of its own: how processes of ours speak to each other, many over a Unix socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.json_values import parse_json

_LONGEST = 100  # bytes of a Unix socket's path that every system takes (Linux 108, macOS 104)
_LARGEST = 16 << 20  # bytes of a message


class Refused(RunError):
    """Report that the keeper answered and refused; the message is the keeper's."""


class Unanswered(RunError):
    """Report a request that was sent whole and not answered: the keeper may have carried it out, or may do so later."""


def to_line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def from_line(line: bytes | bytearray | str) -> dict[str, Any]:
    """Read a JSON object from a line; ValueError where it is something else."""
    match parse_json(line):
        case dict() as message:
            return message
    raise ValueError(f"not a JSON object: {line[:80]!r}")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Return a name for a socket's path that the system takes, however deep the folder is."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise RunError(
            f"the path {path} is too long for a Unix socket; give Cluster(path=…) a shorter one"
        )
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(
    path: Path, kind: socket.SocketKind = socket.SOCK_STREAM, backlog: int = 64
) -> socket.socket:
    """Bind and listen at a path that only this user can reach; an old socket file there is replaced."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, kind)
    with short_path(path) as name:
        server.bind(name)
    path.chmod(0o600)
    server.listen(backlog)
    return server


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the socket at a path; `timeout_s` is the limit of every step from now on."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with short_path(path) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


def read_request(connection: socket.socket) -> dict[str, object]:
    """Read one JSON object that ends with a newline; the connection's time limit is for all of it."""
    data = bytearray()
    limit_s = connection.gettimeout()
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while not data.endswith(b"\n"):
        if end_s is not None:
            connection.settimeout(max(0.001, end_s - time.monotonic()))
        block = connection.recv(65536)
        if not block or len(data) > _LARGEST:
            raise RunError("a message between notebook and keeper was cut off or too long")
        data += block
    connection.settimeout(limit_s)
    try:
        return from_line(data)
    except ValueError as error:
        raise RunError("a message between notebook and keeper is not a JSON object") from error


def ask(path: Path, request: Mapping[str, object], timeout_s: float = 30.0) -> dict[str, Any]:
    """Send one request to the socket at `path` and return the answer.

    Raises:
        Refused: The keeper answered that it does not do it.
        Unanswered: The request was sent, and no whole answer came.
        RunError: The request could not be sent.
    """
    sent = False
    try:
        with connect(path, timeout_s) as connection:
            connection.sendall(to_line(request))
            sent = True
            answer = read_request(connection)
    except OSError as error:
        kind = Unanswered if sent else RunError
        raise kind(f"the keeper of {path.parent} does not answer ({error})") from error
    except RunError as error:
        raise Unanswered(str(error)) if sent else error from error
    if not answer.get("ok"):
        raise Refused(str(answer.get("error", "the keeper refused")))
    return answer
