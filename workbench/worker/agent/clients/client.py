"""Speak with an agent on this machine, or become the bridge to it that the keeper starts over SSH."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workbench.base import wire
from workbench.base.wire import from_line, to_line

_RELAY = "workbench.worker.agent.clients.relay"


class AgentRefused(Exception):
    """What the agent answered instead of doing what it was asked."""


def connect(root: Path, timeout_s: float = 5.0) -> socket.socket:
    """Connect to the agent that serves `root`."""
    return wire.connect(root / "agent.sock", timeout_s)


class Client:
    def __init__(self, root: Path, timeout_s: float = 5.0) -> None:
        self._socket = connect(root, timeout_s)
        self._file = self._socket.makefile("rb")
        self._number = 0

    def ask(self, op: str, **message: object) -> dict[str, Any]:
        self._number += 1
        self._socket.sendall(to_line({"id": self._number, "op": op, **message}))
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("the agent closed the connection")
        reply = from_line(line)
        if not reply.pop("ok"):
            raise AgentRefused(str(reply.get("error")))
        return reply

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def bridge(root: Path) -> int:
    """Connect, and become the relay; return an exit code where there is no agent."""
    try:
        agent = connect(root)
    except OSError as error:
        sys.stderr.write(f"no agent serves {root}: {error}\n")
        return 1
    agent.settimeout(None)
    agent.set_inheritable(True)
    loader: Any = getattr(find_spec(_RELAY), "loader", None)  # of a folder or of a zip
    return os.execv(sys.executable, [sys.executable, "-ISc", loader.get_source(_RELAY), str(agent.fileno()), str(root)])
