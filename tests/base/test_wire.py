"""One JSON object a line, over Unix sockets at any path."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from workbench.base.errors import RunError
from workbench.base.wire import ask, from_line, listen, read_request, to_line


@pytest.mark.parametrize("depth", [1, 30])
def test_a_socket_works_however_deep_its_folder_is(tmp_path: Path, depth: int) -> None:
    folder = tmp_path.joinpath(*["deep-folder"] * depth)
    folder.mkdir(parents=True)
    path = folder / "keeper.sock"
    with listen(path) as server:
        pid = os.fork()
        if pid == 0:
            connection, _ = server.accept()
            request = read_request(connection)
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
        with pytest.raises(RunError, match="does not answer"):
            ask(path, {"op": "stacks"}, timeout_s=1.0)
        assert 0.9 < time.monotonic() - began < 10
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
                connection, _ = server.accept()
                read_request(connection)
                connection.sendall(answer)
                os._exit(0)
            with pytest.raises(RunError, match="not a JSON object"):
                ask(path, {})
            os.waitpid(pid, 0)
