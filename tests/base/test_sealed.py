"""A seal holds for one content, one purpose, one directory and one user's key."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError, RunError
from workbench.base.files.private import known_key, state_folder, user_key
from workbench.base.files.sealed import Moved, NotSealed, read_sealed, without_seal, write_sealed

DATA = {"backend": {"kind": "ssh"}, "count": 3, "lease_s": 0.1, "ä": None, 7: Path("/x")}
READ = {"backend": {"kind": "ssh"}, "count": 3, "lease_s": 0.1, "ä": None, "7": "/x"}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def sealed(root: Path, purpose: str = "cluster") -> Path:
    root.mkdir(exist_ok=True)
    file = root / "cluster.json"
    write_sealed(file, DATA, purpose=purpose, root=root)  # type: ignore[arg-type]
    return file


def test_a_sealed_file_is_read_again_without_its_seal(tmp_path: Path) -> None:
    file = sealed(tmp_path / "c")
    assert read_sealed(file, purpose="cluster", root=file.parent) == READ
    assert without_seal(json.loads(file.read_text())) == READ
    # The order of the keys is no part of the content.
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(raw.items()))))
    assert read_sealed(file, purpose="cluster", root=file.parent) == READ


@pytest.mark.parametrize(
    "change",
    [
        {"count": 4},
        {"count": 3.0},
        {"more": 1},
        {"backend": {"kind": "local"}},
        {"seal": None},
        {"seal": "text"},
        {"seal": {}},
        {"seal": {"of": "/", "hmac": "é"}},
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    file = sealed(tmp_path / "c")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(NotSealed):
        read_sealed(file, purpose="cluster", root=file.parent)


def test_a_seal_of_another_purpose_directory_or_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sealed(tmp_path / "c")
    with pytest.raises(
        NotSealed, match=sentence("the seal of {} is not yours, or the file was changed afterwards")
    ):
        read_sealed(file, purpose="hosts", root=file.parent)
    with pytest.raises(Moved, match=sentence("was copied or moved: {} was written for")):
        read_sealed(file, purpose="cluster", root=tmp_path)
    # The directory that the seal names cannot be changed in the seal.
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "seal": {**raw["seal"], "of": str(tmp_path)}}))
    with pytest.raises(NotSealed) as refused:
        read_sealed(file, purpose="cluster", root=tmp_path)
    assert not isinstance(refused.value, Moved)
    # Another user's key.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    file = sealed(tmp_path / "c")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(NotSealed):
        read_sealed(file, purpose="cluster", root=file.parent)


def test_a_link_is_the_same_directory(tmp_path: Path) -> None:
    file = sealed(tmp_path / "c")
    (tmp_path / "link").symlink_to(file.parent)
    assert read_sealed(file, purpose="cluster", root=tmp_path / "link") == READ


def test_a_name_that_is_not_utf_8_can_be_sealed(tmp_path: Path) -> None:
    file = sealed(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    assert read_sealed(file, purpose="cluster", root=file.parent) == READ


def test_reading_makes_no_key(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text('{"seal": {"of": "x", "hmac": "y"}}')
    with pytest.raises(NotSealed):
        read_sealed(file, purpose="cluster", root=tmp_path)
    assert not state_folder().exists()
    with pytest.raises(RunError, match="cannot be read"):
        read_sealed(tmp_path / "none.json", purpose="cluster", root=tmp_path)


def test_many_at_once_get_the_same_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: user_key(), range(64)))
    assert len(keys) == 1
    assert keys == {known_key()}
    path = state_folder() / "key"
    assert (path.stat().st_size, stat.S_IMODE(path.stat().st_mode)) == (32, 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_part_of_a_key_is_completed_and_proves_nothing() -> None:
    user_key()
    (state_folder() / "key").write_bytes(b"part")
    assert known_key() is None
    assert len(user_key()) == 32
    assert user_key() == known_key()


def test_a_key_that_others_may_know_is_refused() -> None:
    user_key()
    (state_folder() / "key").chmod(0o640)
    for ask in (user_key, known_key):
        with pytest.raises(ConfigError, match=sentence("the next start makes another key")):
            ask()


@pytest.mark.parametrize("given", ["state", "~/state", ""])
def test_a_relative_state_folder_is_ignored_as_xdg_asks(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keeper and notebook have other current folders, and would not find each other."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", given)
    assert state_folder().parent == tmp_path / ".local" / "state"
