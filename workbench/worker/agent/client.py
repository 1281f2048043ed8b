"""Speak with an agent on this machine: one blocking connection, a deadline on every answer.

The keeper, which comes over SSH, has its own client.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

__all__ = ["AgentRefused", "Client", "connect", "socket_address"]

# The address of a Unix socket has 108 bytes, the last one 0.
_PATH_BYTES = 100


class AgentRefused(Exception):
    """Return what the agent answered instead of doing what it was asked."""


@contextlib.contextmanager
def socket_address(root: Path) -> Iterator[str]:
    """Return an address for the agent's socket that is short enough, however deep the root is."""
    path = str(root / "agent.sock")
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield path
        return
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/agent.sock"
    finally:
        os.close(folder)


def connect(root: Path, timeout_s: float = 5.0) -> socket.socket:
    """Connect to the agent that serves `root`."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(timeout_s)
    try:
        with socket_address(root) as address:
            end.connect(address)
    except BaseException:
        end.close()
        raise
    return end


class Client:
    """A connection to the agent of one root."""

    def __init__(self, root: Path, timeout_s: float = 5.0) -> None:
        """Connect."""
        self._socket = connect(root, timeout_s)
        self._file = self._socket.makefile("rb")
        self._number = 0

    def ask(self, op: str, **message: object) -> dict[str, object]:
        """Ask for one thing and wait for the answer."""
        self._number += 1
        self._socket.sendall(json.dumps({"id": self._number, "op": op, **message}).encode() + b"\n")
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the agent closed the connection")
        reply: dict[str, object] = json.loads(line)
        if not reply.pop("ok"):
            raise AgentRefused(str(reply.get("error")))
        return reply

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
