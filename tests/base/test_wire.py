"""One request to the socket of a keeper, at any path, and what becomes of its answer."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.base.messages.lines import LARGEST, Pipes, from_line, send_if_open, to_line, widen
from workbench.base.messages.server import incoming
from workbench.base.messages.wire import Refused, Unanswered, ask, ask_if_there, listen, shut_down


def request_at(server: socket.socket) -> tuple[socket.socket, dict[str, object]]:
    connection, _ = server.accept()
    request = next(incoming(Pipes(connection.fileno(), connection.fileno()), 30.0))
    return connection, dict(request.fields)


@pytest.mark.parametrize("depth", [1, 30])
def test_a_socket_works_however_deep_its_folder_is(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["deep-folder"] * depth)
    folder.mkdir(parents=True)
    path = folder / "keeper.sock"
    with listen(path) as server:
        pid = os.fork()
        if pid == 0:
            connection, request = request_at(server)
            connection.sendall(to_line({"ok": request["n"] == 1, "error": "not one"}))
            os._exit(0)
        assert ask(path, {"n": 1})["ok"] is True
        os.waitpid(pid, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_there_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=str(tmp_path)):
        ask(tmp_path / "keeper.sock", {})


def test_a_line_carries_one_object() -> None:
    line = to_line({"text": "a\nb", "n": 1})
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert from_line(line) == {"text": "a\nb", "n": 1}


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"3", b"\xff"])
def test_anything_but_an_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        from_line(line)


def test_a_false_keeper_that_drips_is_given_up_in_time(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    with listen(path) as server:
        pid = os.fork()
        if pid == 0:
            connection, _ = server.accept()
            while True:
                try:
                    connection.sendall(b" ")
                except OSError:
                    os._exit(0)
                time.sleep(0.2)
        began = time.monotonic()
        with pytest.raises(
            Unanswered, match=sentence("the keeper of {} does not answer ({})", "timed out")
        ):
            ask(path, {"op": "stacks"}, timeout_s=1.0)
        assert time.monotonic() - began > 0.9
        os.waitpid(pid, 0)


def test_an_answer_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    for answer in (
        b"[" * 100_000 + b"\n",
        b'{"ok": ' * 900 + b"1" + b"}" * 900 + b"\n",
        b"5\n",
        b"\xff\n",
    ):
        with listen(path) as server:
            pid = os.fork()
            if pid == 0:
                connection, _request = request_at(server)
                connection.sendall(answer)
                os._exit(0)
            with pytest.raises(Unanswered, match="not a JSON object"):
                ask(path, {})
            os.waitpid(pid, 0)


def test_the_refusal_of_an_older_keeper_is_shown_in_its_words(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    with listen(path) as server:
        pid = os.fork()
        if pid == 0:  # an older keeper: its answers have no number
            for answer in (
                {"ok": False, "error": "the keeper does not know the request 'held'"},
                {"ok": True, "argv": ["x"]},
            ):
                connection, _request = request_at(server)
                connection.sendall(to_line(answer))
                connection.close()
            os._exit(0)
        with pytest.raises(Refused, match=sentence("the keeper does not know the request", "held")):
            ask(path, {"op": "held"})
        assert ask(path, {"op": "dry"})["argv"] == ["x"]
        os.waitpid(pid, 0)


def test_a_request_that_is_too_large_is_refused_by_name_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    with (
        listen(path),
        pytest.raises(RunError, match="the request 'submit' has 16384 KiB") as caught,
    ):
        ask(path, {"op": "submit", "job": "x" * LARGEST})
    assert not isinstance(caught.value, Unanswered), "nothing was sent"


def test_a_line_ends_once_and_wakes_its_reader(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shut_down(ours)
        assert theirs.recv(1) == b""
        theirs.close()
        shut_down(ours)
        send_if_open(ours.fileno(), b"nobody reads")
    shut_down(ours)
    assert ask_if_there(tmp_path / "none.sock", {"op": "status"}) is None


def test_a_pipe_is_widened_and_another_file_stays() -> None:
    read, write = os.pipe()
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        widen(write, 1 << 17)
        assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == 1 << 17
        widen(other, 1 << 17)
    finally:
        for number in (read, write, other):
            os.close(number)
