"""Requests from notebooks to a keeper, and the server that checks and answers them."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.messages import rpc
from workbench.base.messages.lines import Pipes
from workbench.base.messages.server import incoming
from workbench.base.messages.wire import connect, listen, shut_down
from workbench.base.redact import Redactor

logger = logging.getLogger(__name__)
# Pause after a failed accept.
_PAUSE_S = 0.1
# Time between two log lines about failed accepts.
_WARN_S = 30.0
# Time limit for a peer to send its request and to read the answer.
_PEER_S = 30.0
# A busy machine may take long to answer a connection.
_PROBE_S = 10.0
# A single unanswered probe may mean that the machine was asleep.
_DEAF_PROBES = 2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# Requests about a run that are answered at once.
_SHORT = ("cancel", "outcome")


class Status(BaseModel):
    op: Literal["status"]


class Submit(BaseModel):
    """Run a job. `dry` starts no rank and returns the launch command."""

    op: Literal["submit", "dry"]
    run: str
    path: Path
    job: dict[str, Any]
    pods: int | None = None
    environment: dict[str, str] = Field(default_factory=dict, repr=False)
    """Variables of the notebook with the credentials of the job's object store."""


class OfRun(BaseModel):
    """Request about a run, by its id."""

    op: Literal["cancel", "stop", "bring", "fetch", "stacks", "outcome"]
    run: str


class NewestCheckpoint(BaseModel):
    """Request for the newest good checkpoint on the pods of the run in `path`."""

    op: Literal["held"]
    path: Path
    last_step: int | None = None


class SharedFolder(BaseModel):
    """Request to try the shared folder of a new run on the pods. The answer has the problem."""

    op: Literal["folder"]
    path: Path


class Close(BaseModel):
    op: Literal["close"]


Request = Status | Submit | OfRun | NewestCheckpoint | SharedFolder | Close
_Do = Callable[[Request], Mapping[str, object]]
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="op")])


def request_from(message: Mapping[str, object]) -> Request:
    """Parse a request. Raise RunError with the problems if the request is invalid."""
    try:
        return _REQUESTS.validate_python(message)
    except ValidationError as error:
        problems = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors() if each["loc"]]
        if not problems:
            raise RunError(f"the keeper does not know the request {message.get('op')!r}") from error
        raise RunError(
            f"the request {message.get('op')!r} cannot be read: {'; '.join(problems)}"
        ) from error


class RequestServer:
    """Socket of a keeper. A thread per connection answers the request.

    The server works even without free descriptors or threads. A descriptor is reserved for the
    next connection. If no thread can start, the accepting thread answers short requests itself.
    """

    def __init__(self, path: Path, do: _Do, redact: Redactor):
        self._path = path
        self._do = do
        self._redact = redact
        self._server: socket.socket | None = None
        self._spare: int | None = None
        self._warned_s = float("-inf")
        self._unanswered = 0
        self._open()

    def mend(self) -> None:
        """Listen again if the socket's file was deleted or connections are not answered."""
        if not self._path.exists() or self._is_deaf():
            self._drop()
            self._open()

    def close(self) -> None:
        """Stop listening and delete the socket's file. Idempotent."""
        self._drop()
        self._use_spare()
        self._path.unlink(missing_ok=True)

    def _drop(self) -> None:
        server = self._server
        self._server = None
        if server is not None:
            shut_down(server)
            server.close()

    def _open(self) -> None:
        server = listen(self._path)
        self._server = server
        self._unanswered = 0
        try:
            threading.Thread(
                target=self._accept, args=(server,), name="requests", daemon=True
            ).start()
        except RuntimeError:
            # A file without a listener would look like a busy keeper.
            self.close()
            raise

    def _is_deaf(self) -> bool:
        """Probe the keeper's own socket. Return whether several probes in a row failed."""
        try:
            with connect(self._path, _PROBE_S) as probe:
                client = rpc.Client(Pipes(probe.fileno(), probe.fileno(), write_s=_PROBE_S))
                with suppress(rpc.Refused):  # A refusal is an answer.
                    client.call({"op": "probe"}, _PROBE_S)
            answered = True
        except OSError as error:
            # The probe itself had no descriptor, so the state of the socket is unknown.
            if error.errno in _NO_DESCRIPTOR:
                return False
            answered = False
        self._unanswered = 0 if answered else self._unanswered + 1
        if self._unanswered >= _DEAF_PROBES:
            logger.warning("%s does not answer; listening there anew", self._path)
            return True
        return False

    def _accept(self, server: socket.socket) -> None:
        self._keep_spare()
        while self._server is server:
            try:
                connection, _ = server.accept()
            except OSError as error:
                # Closed, or replaced by another socket.
                if self._server is not server:
                    return
                self._warn("cannot accept a request: %s", error)
                self._use_spare()
                time.sleep(_PAUSE_S)
                continue
            self._hand_on(connection)
            self._keep_spare()

    def _hand_on(self, connection: socket.socket) -> None:
        try:
            threading.Thread(
                target=_answer, args=(connection, self._do, self._redact), daemon=True
            ).start()
        except RuntimeError as error:  # No thread can start now.
            self._warn("answering in the accepting thread: %s", error)
            _answer(connection, self._do_at_once, self._redact)

    def _do_at_once(self, request: Request) -> Mapping[str, object]:
        """Answer short requests. Raise RunError for others, as all requests would wait."""
        if isinstance(request, Status | Close):
            return self._do(request)
        if isinstance(request, OfRun) and request.op in _SHORT:
            return self._do(request)
        raise RunError(
            "the keeper cannot start a thread: the limit of processes is reached; try again"
        )

    def _keep_spare(self) -> None:
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _use_spare(self) -> None:
        """Release the spare descriptor for the next accept."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _warn(self, words: str, error: Exception) -> None:
        if time.monotonic() > self._warned_s + _WARN_S:
            self._warned_s = time.monotonic()
            logger.warning(words, error)


def _answer(connection: socket.socket, do: _Do, redact: Redactor) -> None:
    """Answer the request of a connection. Close the connection if no request arrives in time."""
    with connection, suppress(OSError):
        line = connection.fileno()
        for request in incoming(Pipes(line, line, write_s=_PEER_S), _PEER_S):
            try:
                request.answer(do(request_from(request.fields)))
            except WorkbenchError as error:
                request.refuse(redact(str(error)))
            except Exception as error:  # Connection boundary.
                logger.exception("a request")
                request.refuse(f"{type(error).__name__}: {error}")
            return
