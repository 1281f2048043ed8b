"""Carry bytes between this program's stdin and stdout and the agent's socket: what the keeper starts over SSH."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from workbench.worker.agent.clients.client import connect

__all__ = ["bridge"]

_CHUNK_BYTES = 1 << 16
_LAST_WORDS_S = 1.0


def bridge(root: Path) -> int:
    """Carry bytes both ways until either side ends; return an exit code."""
    try:
        agent = connect(root)
    except OSError as error:
        sys.stderr.write(f"no agent serves {root}: {error}\n")
        return 1
    agent.settimeout(None)
    threading.Thread(target=_inward, args=(agent,), daemon=True).start()
    try:
        while data := agent.recv(_CHUNK_BYTES):
            _write(data)
    except OSError:
        return 1
    return 0


def _inward(agent: socket.socket) -> None:
    try:
        while data := os.read(0, _CHUNK_BYTES):
            agent.sendall(data)
        agent.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # either side has ended: so does the bridge
    threading.Event().wait(_LAST_WORDS_S)
    os._exit(0)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
