"""The receiver of workers' reports: a TCP listener for N proven reports before a deadline.

Reports are untrusted: any process may send a report. Invalid input never ends the listener.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationError

from workbench.base.errors import ConfigError, PodError, PodTimeout
from workbench.base.messages.lines import Lines, TooLong, from_line, send_if_open, to_line
from workbench.pods.hostfile import HostEntry, check_address, check_port, check_user
from workbench.pods.pod import Phase, Pod, Report, no_report
from workbench.pods.rendezvous.report import MAX_MESSAGE_BYTES, proof
from workbench.pods.ssh.identity import check_key_line

_LOG = logging.getLogger(__name__)
_READ_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 128
_TICK_S = 0.05


@dataclass(slots=True)
class _WorkerConnection:
    socket: socket.socket
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    since_s: float = field(default_factory=time.monotonic)
    received: Lines = field(default_factory=lambda: Lines(MAX_MESSAGE_BYTES))


class Rendezvous:
    def __init__(self, names: Sequence[str], *, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_bytes(32)
        self.names = tuple(names)
        self.refused: Counter[str] = Counter()
        self._came: dict[str, Pod] = {}
        self._connections: dict[socket.socket, _WorkerConnection] = {}
        self._selector = selectors.DefaultSelector()
        try:
            self._listener = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        except OSError as error:
            self._selector.close()
            raise ConfigError(
                f"the rendezvous cannot listen on {host!r}: {error.strerror or error}"
            ) from error
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.host: str = host
        self.port: int = self._listener.getsockname()[1]

    def __repr__(self) -> str:
        return (
            f"Rendezvous({self.host}:{self.port}, {len(self._came)} "
            f"of {len(self.names)} workers reported)"
        )

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def wait(
        self,
        timeout_s: float,
        *,
        watch: Callable[[], None] = lambda: None,
        status_of: Callable[[str], str] = lambda _name: "",
        report: Report = no_report,
        arrived: Callable[[Sequence[Pod]], None] = lambda _pods: None,
    ) -> list[Pod]:
        self._arrived = arrived
        self._report = report
        started_s = time.monotonic()
        while len(self._came) < len(self.names):
            watch()
            if time.monotonic() - started_s > timeout_s:
                raise PodTimeout(self._missing(timeout_s, status_of))
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                pending = self._connections.get(key.data)
                if pending is not None:
                    self._receive(pending)
            self._drop_idle()
        return [self._came[name] for name in self.names]

    def close(self) -> None:
        for pending in list(self._connections.values()):
            self._close(pending)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        """Accept a connection and send its nonce.

        Above the limit, drop the longest idle connection.
        """
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        pending = _WorkerConnection(connection)
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections.values()))
            self._refuse(oldest, "crowded out")
        self._connections[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ, connection)
        self._say(pending, {"nonce": pending.nonce})

    def _receive(self, pending: _WorkerConnection) -> None:
        try:
            data = pending.socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        pending.received.feed(data)
        try:
            line = pending.received.take()
        except TooLong:
            self._refuse(pending, "too long")
            return
        if line is not None:
            self._judge(pending, line)
        elif not data:
            self._refuse(pending, "cut short")

    def _judge(self, pending: _WorkerConnection, line: bytes) -> None:
        try:
            message = from_line(line)
            text = str(message["report"])
            nonce = str(message["nonce"])
            given = str(message["proof"])
            expected = proof(self.token, "worker", pending.nonce, nonce, text)
            proven = hmac.compare_digest(given.encode(), expected.encode())
        except (ValueError, RecursionError, TypeError, KeyError):
            return self._refuse(pending, "garbage")
        if not proven:
            return self._refuse(pending, "wrong token")
        try:
            error = self._admit(decode_report(text))
        except (ConfigError, PodError) as reason:
            self._answer(pending, nonce, text, str(reason))
            raise PodError(str(reason)) from reason
        return self._answer(pending, nonce, text, error)

    def _admit(self, pod: Pod) -> str:
        if pod.name not in self.names:
            self.refused["unknown worker"] += 1
            _LOG.warning(
                "a worker called %s reported; expected are %s", pod.name, ", ".join(self.names)
            )
            return f"no worker {pod.name} is expected"
        # A worker may report again after a broken connection, but only with the same facts.
        before = self._came.get(pod.name)
        if before is not None and before != pod:
            raise PodError(
                f"two different workers report as {pod.name}: {_where(before)} and {_where(pod)};"
                " is a worker a clone?"
            )
        # Two pods behind one address would be one host.
        for other in self._came.values():
            if other.name != pod.name and _where(other) == _where(pod):
                raise PodError(
                    f"workers {other.name} and {pod.name} both report {_where(pod)}: the same"
                    " host twice, or a clone?"
                )
        if before is None:
            self._came[pod.name] = pod
            missing = [name for name in self.names if name not in self._came]
            waits = f"; waiting for {', '.join(missing)}" if missing else ""
            came = [self._came[name] for name in self.names if name in self._came]
            self._arrived(came)
            self._report(
                f"{len(self._came)} of {len(self.names)} workers reported: {pod.name} at"
                f" {_where(pod)}{waits}"
            )
        return ""

    def _answer(self, pending: _WorkerConnection, nonce: str, text: str, error: str) -> None:
        reason = error[:500]
        proven = proof(self.token, "rendezvous", pending.nonce, nonce, text, reason)
        self._say(pending, {"error": reason, "proof": proven})
        self._close(pending)

    def _say(self, pending: _WorkerConnection, message: dict[str, str]) -> None:
        """Send a line.

        It fits into an empty socket buffer, so a partial write means a dead peer.
        """
        send_if_open(pending.socket.fileno(), to_line(message))

    def _drop_idle(self) -> None:
        """Part with connections that did not send a whole line in time; the oldest stand first."""
        limit_s = time.monotonic() - _READ_TIMEOUT_S
        for oldest in list(self._connections.values()):
            if oldest.since_s >= limit_s:
                break
            self._refuse(oldest, "idle")

    def _refuse(self, pending: _WorkerConnection, reason: str) -> None:
        self.refused[reason] += 1
        _LOG.debug("the rendezvous on port %d refused a connection: %s", self.port, reason)
        self._close(pending)

    def _close(self, pending: _WorkerConnection) -> None:
        if self._connections.pop(pending.socket, None) is not None:
            self._selector.unregister(pending.socket)
            pending.socket.close()

    def _missing(self, timeout_s: float, status_of: Callable[[str], str]) -> str:
        missing = [name for name in self.names if name not in self._came]
        waits = []
        for name in missing:
            words = status_of(name)
            waits.append(f"{name} ({words})" if words else name)
        text = (
            f"{len(self._came)} of {len(self.names)} workers reported "
            f"in {timeout_s:.0f} s; missing: {', '.join(waits)}"
        )
        wrong = self.refused["wrong token"]
        if wrong and not self._came:
            text += f"; {wrong} reports came with a wrong token"
        return text


def _where(pod: Pod) -> str:
    return f"{pod.address}:{pod.ssh_port}"


_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("not the name of a worker")
    return name


def _check_path(text: str) -> str:
    is_absolute = text.startswith("/") and text.isprintable()
    if not is_absolute or ".." in PurePosixPath(text).parts:
        raise ConfigError(f"{text[:80]!r} is not an absolute path")
    return text


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("characters that cannot be printed are not allowed")
    return text


_Path = Annotated[str, AfterValidator(_check_path)]
_Word = Annotated[str, StringConstraints(max_length=80), AfterValidator(_check_printable)]


class _Report(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Annotated[str, AfterValidator(_check_name)]
    address: Annotated[str, AfterValidator(check_address)]
    ssh_port: Annotated[int, AfterValidator(check_port)]
    user: Annotated[str, AfterValidator(check_user)]
    slots: Annotated[
        int, AfterValidator(lambda slots: HostEntry(address="localhost", slots=slots).slots)
    ]
    host_key: Annotated[str, AfterValidator(check_key_line)]
    root: _Path
    python: _Path
    versions: dict[_Word, _Word]


def decode_report(text: str) -> Pod:
    """Read a worker's report; the ConfigError names the worker and what is wrong."""
    try:
        report = _Report.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(_refusal(text, error)) from None
    return Pod(**dict(report), phase=Phase.RUNNING)


def _refusal(text: str, error: ValidationError) -> str:
    problems = {}
    for problem in error.errors():
        place = problem["loc"]
        field = str(place[0]) if place else ""
        problems[field] = problem
    if "" in problems:
        return f"the report is not JSON, or not an object: {problems['']['msg'][:100]}"
    if any(problem["type"] in ("missing", "extra_forbidden") for problem in problems.values()):
        return "the report has not the fields of a worker's report"
    if "name" in problems:
        return "the report has no valid worker name"
    field, problem = next(iter(problems.items()))
    words = problem["msg"].removeprefix("Value error, ")
    worker = json.loads(text)["name"]
    return f"worker {worker} sent an invalid {field.replace('_', ' ')}: {words}"
