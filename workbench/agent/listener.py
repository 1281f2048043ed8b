"""The agent's loop: a single thread and poll, requests of `base/messages` over a Unix socket."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workbench.agent.supervisor import Agent, Later
from workbench.base.files.disk import disk_full, free_bytes, is_full
from workbench.base.messages.server import Request, Requests

_log = logging.getLogger(__name__)

_UNSENT_BYTES = 4 << 20
_READ_BYTES = 1 << 16
_AFTER_MISTAKE_S = 0.2
# Mistakes of the client, which are not logged as the agent's own.
_MISTAKES = (KeyError, ValueError, TypeError, AttributeError, OSError)


@dataclass(slots=True, eq=False)
class _ClientConnection:
    socket: socket.socket
    keeper: bool = False
    closing: bool = False
    unsent: bytearray = field(default_factory=bytearray)
    pending: list[tuple[Request, Later]] = field(default_factory=list)
    requests: Requests = field(init=False)

    def __post_init__(self) -> None:
        self.requests = Requests(self.unsent.extend)

    @property
    def events(self) -> int:
        """Poll events to wait for. A client with too many unread answers is not read."""
        events = 0
        if len(self.unsent) < _UNSENT_BYTES and not self.closing:
            events |= select.POLLIN
        if self.unsent:
            events |= select.POLLOUT
        return events


class Server:
    def __init__(self, agent: Agent, listener: socket.socket) -> None:
        self.agent = agent
        self.listener = listener
        self.connections: list[_ClientConnection] = []
        listener.setblocking(False)

    def run(self, at_end: Callable[[], None]) -> None:
        """Answer requests until the agent is finished. Call `at_end` before the last answers."""
        wake = _wake_on_signals(self.agent)
        while True:
            ready = self._ready(wake)
            for connection in list(self.connections):
                is_read = connection.events & select.POLLIN
                if is_read and connection.socket.fileno() in ready:
                    self._receive(connection)
            if self.listener.fileno() in ready:
                self._accept()
            if wake in ready:
                os.read(wake, 4096)
            if self.agent.output_news in ready:
                os.eventfd_read(self.agent.output_news)
            self._tick()
            if self.agent.finished:
                break  # the last answers are sent after `at_end`
            for connection in list(self.connections):
                self._advance(connection)
        at_end()
        for connection in self.connections:
            self._answer_pending(connection)
            connection.socket.settimeout(1.0)
            self._send(connection)

    def _ready(self, wake: int) -> set[int]:
        """Wait for a client, a signal or the next due time. Return the readable descriptors."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        poll.register(wake, select.POLLIN)
        # Only to be woken: the agent reads this socket on its next tick.
        if self.agent.warm.socket is not None:
            poll.register(self.agent.warm.socket, select.POLLIN)
        for connection in self.connections:
            if connection.events:
                poll.register(connection.socket, connection.events)
        pending = [later for each in self.connections for _, later in each.pending]
        if pending:
            poll.register(self.agent.output_news, select.POLLIN)
        pause_s = min([self.agent.pause_s(), *(later.pause_s for later in pending)])
        happened = poll.poll(1000 * min(pause_s, 60.0))
        return {number for number, events in happened if events & ~select.POLLOUT}

    def _tick(self) -> None:
        try:
            self.agent.tick()
        except Exception:  # loop boundary: ranks must not die of the agent's own mistakes
            _log.exception("tick failed")
            time.sleep(_AFTER_MISTAKE_S)

    def _accept(self) -> None:
        try:
            accepted, _ = self.listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        self.connections.append(_ClientConnection(accepted))

    def _receive(self, connection: _ClientConnection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.requests.received.feed(data)
        connection.closing = not data
        self._answer_requests(connection)

    def _answer_requests(self, connection: _ClientConnection) -> None:
        # A client that sends requests without reading the answers has to wait.
        while len(connection.unsent) < _UNSENT_BYTES:
            request = connection.requests.take()
            if request is None:
                connection.closing = connection.closing or connection.requests.is_broken
                return
            self._answer(connection, request)

    def _answer(self, connection: _ClientConnection, request: Request) -> None:
        message = request.fields
        if message.get("op") == "hello" and message.get("keeper") is True:
            connection.keeper = True
        if connection.keeper:
            self.agent.renew()
        try:
            reply = self.agent.operations[message["op"]](message)
        except _MISTAKES as error:
            request.refuse(_words(error, self.agent.root))
        except Exception as error:  # request boundary: the agent outlives its own mistakes
            _log.exception("request failed")
            request.refuse(_words(error, self.agent.root))
        else:
            if isinstance(reply, Later):
                connection.pending.append((request, reply))
            else:
                request.answer(reply)

    def _answer_pending(self, connection: _ClientConnection) -> None:
        for request, later in list(connection.pending):
            reply = later.ready()
            if reply is None:
                continue
            connection.pending.remove((request, later))
            if "error" in reply:
                request.refuse(str(reply["error"]), full=reply.get("full") is True)
            else:
                request.answer(reply)

    def _advance(self, connection: _ClientConnection) -> None:
        self._answer_pending(connection)
        if not self._send(connection):
            # The peer has gone. Wait for its pending work, and drop the answer.
            connection.closing = True
            connection.unsent.clear()
        self._answer_requests(connection)
        if connection.closing and not connection.unsent and not connection.pending:
            connection.socket.close()
            self.connections.remove(connection)

    def _send(self, connection: _ClientConnection) -> bool:
        while connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent[: 1 << 18])
            except (BlockingIOError, TimeoutError):
                return True
            except OSError:
                return False
            del connection.unsent[:sent]
        return True


def _wake_on_signals(agent: Agent) -> int:
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: agent.end("SIGTERM"))
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    return wake


def _words(error: BaseException, root: Path) -> str:
    match error:
        case KeyError():
            return f"unknown or missing: {error.args[0]}"
        case OSError() if is_full(error):
            return str(disk_full(root, None, free_bytes(root), where=root.name))
    return str(error) or type(error).__name__
