"""Files are replaced whole, and nobody else can read them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from workbench.base.files import read_json, write_json, write_text


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
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode), target.is_symlink()) == ("secret", 0o600, False)
