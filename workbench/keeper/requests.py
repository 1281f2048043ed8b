"""What a notebook can ask of a keeper: one record for each request, checked when it comes in."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.redact import Redactor
from workbench.base.wire import listen, read_request, to_line

logger = logging.getLogger(__name__)


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
        raise RunError(f"the request {message.get('op')!r} cannot be read: {'; '.join(problems)}") from error


class RequestServer:
    """The socket of a keeper: each connection is answered in a thread of its own."""

    def __init__(self, path: Path, do: _Do, redact: Redactor):
        self._path, self._do, self._redact = path, do, redact
        self._open()

    def mend(self) -> None:
        """Listen again where somebody removed the socket's file."""
        if not self._path.exists():
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits there
            self._server.close()
            self._open()

    def close(self) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        self._server = listen(self._path)
        threading.Thread(target=self._accept, args=(self._server,), name="requests", daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(connection, self._do, self._redact), daemon=True).start()


def _answer(connection: socket.socket, do: _Do, redact: Redactor) -> None:
    with connection:
        connection.settimeout(30)
        try:
            answer: dict[str, object] = {"ok": True, **do(request_from(read_request(connection)))}
        except WorkbenchError as error:
            answer = {"ok": False, "error": redact(str(error))}
        except Exception as error:  # connection boundary
            logger.exception("a request")
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            connection.sendall(to_line(answer))
