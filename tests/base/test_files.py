"""Files are replaced whole, and nobody else can read them."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from workbench.base.errors import RunError
from workbench.base.files import load_json, read_json, read_text, write_json, write_text


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


def test_a_private_file_replaces_and_follows_no_link(tmp_path: Path) -> None:
    target, outside = tmp_path / "file", tmp_path / "outside"
    outside.write_text("untouched")
    target.symlink_to(outside)
    write_text(target, "secret")
    assert outside.read_text() == "untouched"
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode), target.is_symlink()) == (
        "secret",
        0o600,
        False,
    )


def test_only_regular_files_are_read_and_no_link_is_followed(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    (outside / "logs").mkdir(parents=True)
    (outside / "logs" / "a.json").write_text('{"canary": 1}')
    run.mkdir()
    (run / "link.json").symlink_to(outside / "logs" / "a.json")
    (run / "zero.json").symlink_to("/dev/zero")
    (run / "loop.json").symlink_to("loop.json")
    (run / "logs").symlink_to(outside / "logs")
    (run / "folder.json").mkdir()
    os.mkfifo(run / "pipe.json")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(run / "socket.json"))
    (run / "huge.json").touch()
    os.truncate(run / "huge.json", 1 << 40)
    (run / "deep.json").write_text("[" * 100_000)
    (run / "levels.json").write_text('{"a":' * 500 + "1" + "}" * 500)
    (run / "list.json").write_text("[1]")
    for name, why in (
        ("link.json", "it is a link, and no link is followed there"),
        ("zero.json", "it is a link"),
        ("loop.json", "it is a link"),
        ("logs/a.json", "its folder is a link"),
        ("folder.json", "it is not a regular file"),
        ("pipe.json", "it is not a regular file"),
        ("socket.json", "it is not a regular file"),
        ("huge.json", "it holds more than 16 MiB"),
        ("deep.json", "it is nested too deeply"),
        ("levels.json", "it is nested too deeply"),
        ("list.json", "it is not a JSON object"),
        ("none.json", "there is no such file"),
        ("nul\0.json", "embedded null"),
    ):
        with pytest.raises(RunError) as refused:
            load_json(run / name, within=run)
        assert str(refused.value).startswith(f"{run / name} cannot be read: ")
        assert why in str(refused.value), name
        assert read_json(run / name, within=run) == {}


def test_the_run_directory_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "inputs").mkdir(parents=True)
    write_json(tmp_path / "real" / "inputs" / "job.json", {"a": 1})
    (tmp_path / "newest").symlink_to("real")
    assert read_json(tmp_path / "newest" / "inputs" / "job.json", within=tmp_path / "newest") == {
        "a": 1
    }
    assert read_text(tmp_path / "newest" / "inputs" / "job.json") == '{\n "a": 1\n}\n'


def test_every_record_that_is_written_can_be_read(tmp_path: Path) -> None:
    """A rank chose the words of its error, and half of a surrogate pair is no text."""
    path = tmp_path / "result.json"
    write_json(path, {"message": "a\ud800b", "other": "\U0001f600 \\ud800"})
    assert load_json(path) == {"message": "a?b", "other": "\U0001f600 \\ud800"}
