"""Unix sockets at any path, and requests of a notebook to the keeper behind a socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.messages import rpc
from workbench.base.messages.lines import Pipes, TooLong

_LONGEST = 100  # bytes of a Unix socket's path that every system takes (Linux 108, macOS 104)


class Refused(RunError):
    """Report that the keeper answered and refused; the message is the keeper's."""


class Unanswered(RunError):
    """Report a sent request without an answer: the keeper may have acted on it, or will."""


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a path to the socket that is short enough for the system at any depth of the folder."""
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
    """Bind and listen at a path that only this user can reach. An old socket file is replaced."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, kind)
    with short_path(path) as name:
        server.bind(name)
    path.chmod(0o600)
    server.listen(backlog)
    return server


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Connect to the socket at a path. `timeout_s` limits every later step too."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with short_path(path) as name:
            connection.connect(name)
    except BaseException:
        connection.close()
        raise
    return connection


def shut_down(line: socket.socket) -> None:
    """End a connection or a listener, and wake the threads that wait there. Idempotent."""
    with suppress(OSError):  # ended or never connected
        line.shutdown(socket.SHUT_RDWR)


def ask(path: Path, request: Mapping[str, object], timeout_s: float = 30.0) -> dict[str, Any]:
    """Send a request to the socket at `path` and return the answer.

    Raises:
        Refused: The keeper refused the request.
        Unanswered: The request was sent, and no complete answer came.
        RunError: The request could not be sent.
    """
    sent = False
    try:
        with connect(path, timeout_s) as connection:
            line = connection.fileno()
            client = rpc.Client(Pipes(line, line, write_s=timeout_s))
            call = client.send(request)
            sent = True
            return client.result(call, timeout_s)
    except rpc.Refused as refusal:
        raise Refused(str(refusal)) from refusal
    except TooLong as error:
        raise RunError(str(error)) from error
    except OSError as error:
        kind = Unanswered if sent else RunError
        why = "timed out" if isinstance(error, TimeoutError) else error
        raise kind(f"the keeper of {path.parent} does not answer ({why})") from error


def ask_if_there(
    path: Path, request: Mapping[str, object], timeout_s: float = 30.0
) -> dict[str, Any] | None:
    """Return the answer at `path`; None if the other side refuses, has ended or is silent."""
    try:
        return ask(path, request, timeout_s)
    except RunError:
        return None
