"""A port of a pod on a loopback port of this machine, tunnelled through the API server's WebSocket.

Speaks `v4.channel.k8s.io`. The first byte of a message is its channel: 0 for data, 1 for errors.
The first message of a channel is the port. The client's own `PortForward` buffers without limit for
a slow reader, so we do not use it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.base.messages.wire import shut_down
from workbench.pods.kubernetes.api import ApiRefusal

_LOG = logging.getLogger(__name__)
_CHUNK = 128 * 1024
_DATA = 0
_ERROR = 1


class PortForward:
    """Listen on 127.0.0.1 while open, and forward every connection."""

    def __init__(self, dial: Callable[[], Any], port: int):
        self._dial = dial
        self._remote_port = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.port: int = self._listener.getsockname()[1]
        """The port on this machine."""
        self._live: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = self._is_broken = False
        self._refusal: ApiRefusal | None = None
        threading.Thread(target=self._accept, name=f"port-forward {self.port}", daemon=True).start()

    def check(self, limit_s: float) -> None:
        """Open a connection to the pod; raise if the API server does not allow port-forwards.

        All other trouble may pass, and SSH tries again.
        """
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), limit_s) as tried,
        ):
            tried.recv(1)
        if self._refusal is not None:
            raise self._refusal

    def close(self) -> None:
        with self._lock:
            self._closed = True
            live = list(self._live)
        for one in [self._listener, *live]:
            shut_down(one)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._live.add(connection)
                closed = self._closed
            if closed:
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a connection to its end, then close both sides in any case."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            channel = self._dial()
            try:
                _carry(connection, channel, lambda: self._note(""))
            finally:
                # The peer may be gone in the middle of its farewell.
                with contextlib.suppress(Exception):
                    channel.close(timeout=1)
        except WorkbenchError as error:
            if isinstance(error, ApiRefusal) and error.status in (401, 403):
                self._refusal = error
            self._note(str(error))
        # Thread boundary: websocket-client has a tree of errors of its own.
        except Exception as error:
            self._note(f"it ended: {error}")
        finally:
            with self._lock:
                self._live.discard(connection)
            connection.close()

    def _note(self, trouble: str) -> None:
        """Log when the tunnel breaks and when the tunnel works again, and nothing in between."""
        with self._lock:
            has_changed = bool(trouble) != self._is_broken and not self._closed
            self._is_broken = bool(trouble)
        if has_changed and trouble:
            _LOG.warning("port-forward to port %d: %s", self._remote_port, trouble)
        elif has_changed:
            _LOG.info("port-forward to port %d works again", self._remote_port)


def _carry(connection: socket.socket, channel: Any, heard: Callable[[], None]) -> None:
    opened: set[int] = set()
    while True:
        pending = getattr(channel.sock, "pending", lambda: 0)()
        readable = (
            [channel.sock] if pending else select.select([connection, channel.sock], [], [])[0]
        )
        if channel.sock in readable:
            data = _receive(channel, opened)
            if data is None:
                return
            if data:
                heard()
            connection.sendall(data)
        if connection in readable:
            data = connection.recv(_CHUNK)
            if not data:
                return
            channel.send_binary(bytes([_DATA]) + data)


def _receive(channel: Any, opened: set[int]) -> bytes | None:
    from websocket import ABNF

    opcode, frame = channel.recv_data_frame()
    if opcode == ABNF.OPCODE_CLOSE:
        return None
    number = frame.data[0]
    data = bytes(frame.data[1:])
    if number not in opened:
        opened.add(number)
        if len(data) != struct.calcsize("<H"):
            raise ValueError(f"the API server speaks another protocol: {data[:20]!r}")
        return b""
    if number == _ERROR:
        raise ConnectionError(f"the kubelet says: {data.decode(errors='replace').strip()}")
    return data
