import json
import os
from pathlib import Path

import pytest

from workbench.base.errors import RunError
from workbench.base.files import read_json, write_json
from workbench.base.wire import ask, listen, read_request


def test_a_state_file_is_whole_and_private_leftovers_are_none(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    with pytest.raises(ValueError):
        write_json(path, {"a": _circular()})
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    assert read_json(path) == {"a": 2}


def _circular() -> list[object]:
    ring: list[object] = []
    ring.append(ring)
    return ring


def test_missing_and_broken_files_are_empty(tmp_path: Path) -> None:
    assert read_json(tmp_path / "none") == {}
    (tmp_path / "half").write_text('{"a": ')
    assert read_json(tmp_path / "half") == {}


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
            connection.sendall(json.dumps({"ok": request["n"] == 1, "error": "not one"}).encode() + b"\n")
            os._exit(0)
        assert ask(path, {"n": 1})["ok"] is True
        os.waitpid(pid, 0)
    assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_there_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=str(tmp_path)):
        ask(tmp_path / "keeper.sock", {})
