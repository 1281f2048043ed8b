"""What a notebook can ask of a keeper: one record for each request, checked when it comes in."""

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

from workbench.base import rpc
from workbench.base.errors import RunError, WorkbenchError
from workbench.base.lines import Pipes
from workbench.base.redact import Redactor
from workbench.base.wire import connect, listen

logger = logging.getLogger(__name__)
_PAUSE_S = 0.1  # after an accept that failed
_WARN_S = 30.0  # between two lines of the log about it
_PEER_S = 30.0  # for a peer to send its request, and to take the answer
_PROBE_S = 10.0  # a busy machine may take its time to answer a connection
_DEAF_PROBES = 2  # one unanswered probe alone may be a machine that was asleep
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_SHORT = ("cancel", "outcome")  # what a run is asked that takes no time


class Status(BaseModel):
    op: Literal["status"]


class Submit(BaseModel):
    """Carry out a job; `dry` stops before anything of it starts and answers with the command."""

    op: Literal["submit", "dry"]
    run: str
    path: Path
    job: dict[str, Any]
    pods: int | None = None


class OfRun(BaseModel):
    """Something that a run is asked, by its id."""

    op: Literal["cancel", "stop", "bring", "fetch", "stacks", "outcome"]
    run: str


class NewestCheckpoint(BaseModel):
    """The newest good checkpoint that the pods keep of the run in this directory."""

    op: Literal["held"]
    path: Path
    last_step: int | None = None


class Close(BaseModel):
    op: Literal["close"]


Request = Status | Submit | OfRun | NewestCheckpoint | Close
_Do = Callable[[Request], Mapping[str, object]]
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="op")])


def request_from(message: Mapping[str, object]) -> Request:
    """Read a request; a RunError says what is wrong with it."""
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
    """The socket of a keeper: each connection is answered in a thread of its own.

    It survives a process without free descriptors or threads. One descriptor is kept in reserve for the next
    connection. Where no thread can start, the accepting thread answers the short requests by itself.
    """

    def __init__(self, path: Path, do: _Do, redact: Redactor):
        self._path, self._do, self._redact = path, do, redact
        self._server: socket.socket | None = None
        self._spare: int | None = None
        self._warned_s = float("-inf")
        self._unanswered = 0
        self._open()

    def mend(self) -> None:
        """Listen again where the socket's file was removed, or where connections are not answered."""
        if not self._path.exists() or self._is_deaf():
            self._drop()
            self._open()

    def close(self) -> None:
        """Stop listening and remove the socket's file. Idempotent."""
        self._drop()
        self._use_spare()
        self._path.unlink(missing_ok=True)

    def _drop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            server.close()

    def _open(self) -> None:
        server = listen(self._path)
        self._server, self._unanswered = server, 0
        try:
            threading.Thread(
                target=self._accept, args=(server,), name="requests", daemon=True
            ).start()
        except RuntimeError:
            self.close()  # a file without a listener would look like a keeper that is busy
            raise

    def _is_deaf(self) -> bool:
        """Connect to the own socket; return whether several connections in a row got no answer."""
        try:
            with connect(self._path, _PROBE_S) as probe:
                client = rpc.Client(Pipes(probe.fileno(), probe.fileno(), write_s=_PROBE_S))
                with suppress(rpc.Refused):  # a refusal is an answer
                    client.call({"op": "probe"}, _PROBE_S)
            answered = True
        except OSError as error:
            if (
                error.errno in _NO_DESCRIPTOR
            ):  # the probe itself had none: nothing is known of the socket
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
                if self._server is not server:  # closed, or another one has taken its place
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
        except RuntimeError as error:  # no thread can start at this moment
            self._warn("answering in the accepting thread: %s", error)
            _answer(connection, self._do_at_once, self._redact)

    def _do_at_once(self, request: Request) -> Mapping[str, object]:
        """Answer what takes no time; refuse the rest, which would keep all other requests waiting."""
        if isinstance(request, Status | Close):
            return self._do(request)
        if isinstance(request, OfRun) and request.op in _SHORT:
            return self._do(request)
        raise RunError(
            "the keeper can start no thread at this moment: the limit of processes is reached; try again"
        )

    def _keep_spare(self) -> None:
        if self._spare is None:
            with suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _use_spare(self) -> None:
        """Give the spare descriptor up, so that the next accept has one."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _warn(self, words: str, error: Exception) -> None:
        if time.monotonic() > self._warned_s + _WARN_S:
            self._warned_s = time.monotonic()
            logger.warning(words, error)


def _answer(connection: socket.socket, do: _Do, redact: Redactor) -> None:
    """Answer the one request of a connection; a peer that sends none in time is dropped."""
    with connection, suppress(OSError):
        line = connection.fileno()
        for request in rpc.incoming(Pipes(line, line, write_s=_PEER_S), _PEER_S):
            try:
                request.answer(do(request_from(request.fields)))
            except WorkbenchError as error:
                request.refuse(redact(str(error)))
            except Exception as error:  # connection boundary
                logger.exception("a request")
                request.refuse(f"{type(error).__name__}: {error}")
            return
