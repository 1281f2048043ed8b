"""The socket of a keeper: it answers, is opened anew, and outlives a shortage: no process."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.poll import until
from workbench.base.errors import RunError
from workbench.base.messages.wire import ask, connect, listen
from workbench.base.redact import Redactor
from workbench.keeper import requests as module
from workbench.keeper.requests import Request, RequestServer, request_from


def echo(request: Request) -> Mapping[str, object]:
    return {"op": request.op}


def answers(path: Path) -> bool:
    """Whether a server answers at the socket."""
    try:
        return bool(ask(path, {"op": "status"}, timeout_s=5.0)["op"] == "status")
    except RunError:
        return False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def server(path: Path) -> Iterator[RequestServer]:
    server = RequestServer(path, echo, Redactor())
    yield server
    server.close()


def threads() -> int:
    return sum(thread.name == "requests" for thread in threading.enumerate())


def test_a_server_answers_until_it_is_closed(path: Path) -> None:
    before = threads()
    server = RequestServer(path, echo, Redactor())
    assert answers(path) and answers(path)
    assert threads() == before + 1
    server.close()
    server.close()
    assert not path.exists()
    assert not answers(path)
    until(lambda: threads() == before, 20)


def test_errors_are_told_to_the_notebook_without_secrets(path: Path) -> None:
    errors = [RunError("bad token a-secret-word"), ValueError("an odd state")]

    def fail(_request: Request) -> Mapping[str, object]:
        raise errors.pop(0)

    server = RequestServer(path, fail, Redactor({"HF_TOKEN": "a-secret-word"}))
    with pytest.raises(RunError, match="bad token") as refused:
        ask(path, {"op": "status"})
    assert "a-secret-word" not in str(refused.value)
    with pytest.raises(RunError, match="ValueError: an odd state"):
        ask(path, {"op": "status"})
    with pytest.raises(RunError, match="'explode'"):
        ask(path, {"op": "explode"})
    server.close()


def test_a_request_that_lacks_a_field_names_the_field() -> None:
    with pytest.raises(RunError, match="run: ") as refused:
        request_from({"op": "cancel"})
    assert "'cancel'" in str(refused.value)


# A socket that is opened anew.


def test_a_server_that_answers_is_left_alone(path: Path, server: RequestServer) -> None:
    inode = path.stat().st_ino
    for _ in range(3):
        server.mend()
    assert path.stat().st_ino == inode


def test_a_socket_whose_file_was_deleted_is_opened_anew(path: Path, server: RequestServer) -> None:
    before = threads()
    path.unlink()
    server.mend()
    assert answers(path)
    until(lambda: threads() == before, 20)


def deaf(monkeypatch: pytest.MonkeyPatch, *problems: OSError | None) -> None:
    """Have probes of the socket fail with these errors in turn; None: the probe is answered."""
    left = list(problems)
    opens = connect

    def probe(path: Path, timeout_s: float) -> Any:
        problem = left.pop(0) if left else None
        if problem is not None:
            raise problem
        return opens(path, timeout_s)

    monkeypatch.setattr(module, "connect", probe)


REFUSED = OSError(errno.ECONNREFUSED, "Connection refused")


def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that gets each socket that is opened."""
    seen: list[Path] = []
    opens = listen

    def note(path: Path) -> socket.socket:
        seen.append(path)
        return opens(path)

    monkeypatch.setattr(module, "listen", note)
    return seen


def test_a_socket_is_opened_anew_after_two_probes_without_an_answer(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    deaf(monkeypatch, REFUSED, REFUSED, REFUSED, REFUSED)
    seen = opened(monkeypatch)
    counts = []
    for _ in range(4):
        server.mend()
        counts.append(len(seen))
    assert counts == [0, 1, 1, 2]
    assert len(caplog.records) == 2


def test_an_answer_makes_up_for_a_probe_without_one(
    server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch, REFUSED, None, REFUSED, None)
    seen = opened(monkeypatch)
    for _ in range(4):
        server.mend()
    assert seen == []


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_probe_without_a_descriptor_says_nothing_of_the_socket(
    number: int, server: RequestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf(monkeypatch, *[OSError(number, "Too many open files")] * 4)
    seen = opened(monkeypatch)
    for _ in range(4):
        server.mend()
    assert seen == []


def test_a_server_without_a_thread_leaves_no_socket(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a listener would look like a keeper that is busy."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        RequestServer(path, echo, Redactor())
    assert not path.exists()


# A shortage.


class Listener:
    """A listening socket whose accepts do what a test says, and then wait."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], Any]] = []
        self.over = threading.Event()
        self.waits = threading.Event()

    def accept(self) -> tuple[Any, object]:
        if not self.acts:
            self.waits.set()
            self.over.wait(300)
            raise OSError(errno.EBADF, "closed")
        return self.acts.pop(0)(), None

    def shutdown(self, _how: int) -> None:
        self.over.set()

    def close(self) -> None:
        self.over.set()


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Short:
    """A server over a scripted socket, which has no descriptor for some accepts."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hand = Hand()
        self.listener = Listener()
        self.spares: list[bool] = []
        self.answered: list[object] = []
        monkeypatch.setattr(module, "time", self.hand)
        monkeypatch.setattr(module, "listen", lambda _path: self.listener)
        monkeypatch.setattr(module, "_answer", lambda *args: self.answered.append(args[0]))
        self._path = path

    def run(self, *acts: Callable[[], Any]) -> RequestServer:
        """Serve until the acts are over; return the server."""
        self.listener.acts = [self._noting(act) for act in acts]
        self.server = RequestServer(self._path, echo, Redactor())
        assert self.listener.waits.wait(300)
        return self.server

    def _noting(self, act: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            until(lambda: hasattr(self, "server"), 20)
            self.spares.append(self.server._spare is not None)
            return act()

        return noting


@pytest.fixture
def short(path: Path, monkeypatch: pytest.MonkeyPatch) -> Short:
    return Short(path, monkeypatch)


def no_descriptor() -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_the_spare_descriptor_is_for_the_next_connection_after_a_shortage(short: Short) -> None:
    connection = SimpleNamespace()
    server = short.run(no_descriptor, lambda: connection, lambda: connection)
    assert short.spares == [True, False, True]
    assert len(short.hand.pauses) == 1
    until(lambda: len(short.answered) == 2, 20)
    spare = server._spare
    assert spare is not None
    os.fstat(spare)
    server.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(spare)


def test_a_shortage_is_logged_now_and_then(short: Short, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

    def later() -> Any:
        short.hand.now += 20.0
        return no_descriptor()

    short.run(*[no_descriptor] * 3, later, later).close()
    assert len(caplog.records) == 2


def test_a_server_that_is_closed_logs_no_failed_accept(
    short: Short, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    before = threads()
    short.run().close()
    until(lambda: threads() <= before, 20)
    assert caplog.records == []


def test_short_requests_are_answered_without_a_thread(path: Path, server: RequestServer) -> None:
    for op in ("status", "close"):
        assert server._do_at_once(request_from({"op": op})) == {"op": op}
    for op in ("cancel", "outcome"):
        assert server._do_at_once(request_from({"op": op, "run": "r"})) == {"op": op}
    for op in ("stop", "fetch", "bring", "stacks"):
        with pytest.raises(RunError):
            server._do_at_once(request_from({"op": op, "run": "r"}))
    with pytest.raises(RunError):
        server._do_at_once(request_from({"op": "held", "path": "/run"}))
