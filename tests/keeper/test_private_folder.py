"""A keeper restores its private folder, until its cluster closes: no process."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from workbench.base.files.locks import is_locked
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.keeper.private_dir import PrivateDir
from workbench.keeper.spawn import take_lock
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.store import journal_of


class Kept:
    """A cluster's private folder with a key, a note, and what the keeper writes itself."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        make_cluster_folder(root)
        self.paths = ClusterPaths(root)
        self.folder = cluster_folder(root)
        take_lock(self.paths.keeper_lock)
        self.key = self.paths.identity / "id_ed25519"
        self.key.parent.mkdir(mode=0o700)
        self.key.write_text("a key")
        self.key.chmod(0o600)
        self.own = PrivateDir(self.paths)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    return Kept(tmp_path / "c")


def test_a_removed_key_is_restored(kept: Kept) -> None:
    kept.own.mend()
    kept.key.unlink()
    kept.own.mend()
    assert kept.key.read_text() == "a key"
    assert kept.key.stat().st_mode & 0o077 == 0


def test_a_removed_folder_is_restored_with_its_lock(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    kept.own.mend()
    assert caplog.records == []
    shutil.rmtree(kept.folder)
    kept.own.mend()
    assert kept.key.read_text() == "a key"
    assert kept.key.parent.stat().st_mode & 0o777 == 0o700
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert is_locked(kept.paths.keeper_lock)
    assert len(caplog.records) == 1


def test_a_removed_lock_is_taken_anew(kept: Kept) -> None:
    kept.own.mend()
    kept.paths.keeper_lock.unlink()
    kept.own.mend()
    assert is_locked(kept.paths.keeper_lock)


def test_a_key_that_was_written_again_is_kept_in_its_new_form(kept: Kept) -> None:
    kept.own.mend()
    kept.key.write_text("a new key")
    os.utime(kept.key, ns=(1, 1))
    kept.own.mend()
    kept.key.unlink()
    kept.own.mend()
    assert kept.key.read_text() == "a new key"


def test_a_file_of_the_very_beginning_of_time_is_kept(kept: Kept) -> None:
    for ns in (0, -1, 2):
        os.utime(kept.key, ns=(ns, ns))
        kept.own.mend()
        kept.key.unlink()
        kept.own.mend()
        assert kept.key.exists(), ns


def test_files_that_the_keeper_writes_itself_are_not_restored(kept: Kept) -> None:
    paths = kept.paths
    written = (paths.own_state, paths.store, journal_of(paths.store))
    for path in written:
        path.write_text("{}")
    kept.own.mend()
    for path in written:
        path.unlink()
    kept.own.mend()
    assert not any(path.exists() for path in written)


def test_a_file_that_is_being_written_is_not_kept(kept: Kept) -> None:
    half = kept.folder / ".note.part"
    half.write_text("half")
    kept.own.mend()
    half.unlink()
    kept.own.mend()
    assert not half.exists()


def test_the_keys_of_a_closed_cluster_do_not_come_back(kept: Kept) -> None:
    kept.own.mend()
    kept.own.close()
    kept.key.unlink()
    kept.own.mend()
    kept.own.close()
    assert not kept.key.exists()
    shutil.rmtree(kept.folder)
    kept.own.mend()
    assert not kept.folder.exists()
