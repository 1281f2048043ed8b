"""Requests and answers as JSON lines over a Unix socket: how the notebook speaks to the keeper.

The agent speaks the same form but must not import this package, so it has its own few lines.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from workbench.base.errors import RunError

__all__ = ["ask", "listen", "read_request", "short_path"]

_LONGEST = 100  # bytes of a Unix socket's path that every system takes (Linux 108, macOS 104)


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Return a name for a socket's path that the system takes, however deep the folder is."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise RunError(f"the path {path} is too long for a Unix socket; give Cluster(path=…) a shorter one")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """Bind and listen at a path that only this user can reach; an old socket file there is replaced."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(path) as name:
        server.bind(name)
    path.chmod(0o600)
    server.listen(64)
    return server


def read_request(connection: socket.socket, limit: int = 16 << 20) -> dict[str, object]:
    """Read one JSON object that ends with a newline."""
    data = bytearray()
    while not data.endswith(b"\n"):
        block = connection.recv(65536)
        if not block or len(data) > limit:
            raise RunError("a message between notebook and keeper was cut off or too long")
        data += block
    try:
        message = json.loads(data)
    except ValueError as error:
        raise RunError("a message between notebook and keeper is no JSON") from error
    if not isinstance(message, dict):
        raise RunError("a message between notebook and keeper is no JSON object")
    return message


def ask(path: Path, request: Mapping[str, object], timeout_s: float = 30.0) -> dict[str, object]:
    """Send one request to the socket at `path` and return the answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            with short_path(path) as name:
                connection.connect(name)
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = read_request(connection)
    except OSError as error:
        raise RunError(f"the keeper of {path.parent} does not answer ({error})") from error
    if not answer.get("ok"):
        raise RunError(str(answer.get("error", "the keeper refused")))
    return answer
