"""The register of this user's clusters, and what is removed from it."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.base.errors import ConfigError
from workbench.base.files import read_json, write_json
from workbench.base.files.private import cluster_folder, make_cluster_folder
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import (
    NotRegistered,
    prune,
    register,
    registered,
    registration,
    unregister,
    why_not_registered,
)
from workbench.rundir.register.store import create_store

STORED = {"backend": {"kind": "local"}, "count": 2, "pods": {"env": {"TOKEN": "…"}}}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def started(root: Path, *, age_s: float = 7200.0) -> ClusterPaths:
    """A registered cluster whose private files are of an age."""
    root.mkdir(parents=True)
    paths = ClusterPaths(root)
    register(paths, STORED)
    paths.keeper_lock.touch(0o600)
    age(paths, age_s)
    return paths


def age(paths: ClusterPaths, age_s: float) -> None:
    then = time.time() - age_s
    for file in (*cluster_folder(paths.root).iterdir(), cluster_folder(paths.root)):
        os.utime(file, (then, then))


def changed(paths: ClusterPaths, **facts: Any) -> None:
    entry = registration(paths.root)
    assert entry is not None
    create_store(paths.store, replace(entry, **facts))


def test_an_entry_has_the_place_and_the_specification(tmp_path: Path) -> None:
    paths = started(tmp_path / "c")
    entry = registered(paths.root)
    facts = paths.root.stat()
    assert (entry.path, entry.inode, entry.device) == (
        str(paths.root),
        facts.st_ino,
        facts.st_dev,
    )
    assert entry.spec == STORED
    assert read_json(paths.config) == {**STORED, "started": {}}
    (tmp_path / "link").symlink_to(paths.root)
    assert registered(tmp_path / "link") == entry
    unregister(paths.root)
    unregister(paths.root)
    assert registration(paths.root) is None
    with pytest.raises(NotRegistered):
        registered(paths.root)


def test_the_device_counts_within_one_start_of_the_machine_on_a_disk(tmp_path: Path) -> None:
    """Numbers of disks may change with a restart, and of network file systems with a mount."""
    paths = started(tmp_path / "c")
    disk = os.makedev(250, 7)
    network = os.makedev(0, 99999)
    changed(paths, device=disk)
    assert why_not_registered(paths.root)
    changed(paths, device=network)
    assert why_not_registered(paths.root) == ""
    changed(paths, device=disk, boot="an earlier one")
    assert why_not_registered(paths.root) == ""
    changed(paths, inode=1)
    assert why_not_registered(paths.root)


@pytest.mark.parametrize("raw", [b"", b"no store" * 1000, b"\xff"])
def test_a_damaged_store_registers_nothing(tmp_path: Path, raw: bytes) -> None:
    paths = started(tmp_path / "c")
    paths.store.write_bytes(raw)
    assert registration(paths.root) is None
    assert says(
        why_not_registered(paths.root), "is damaged, and does not tell whose the cluster in"
    )
    prune()
    assert paths.store.exists()


def test_the_directory_s_own_specification_is_only_for_readers(tmp_path: Path) -> None:
    """A pod or another person may have written the file."""
    paths = started(tmp_path / "c")
    for forged in ({"backend": {"kind": "kubernetes"}}, {}):
        write_json(paths.config, forged)
        assert registered(paths.root).spec == STORED


def test_a_start_removes_the_private_folders_of_directories_that_are_gone(tmp_path: Path) -> None:
    gone = started(tmp_path / "gone")
    there = started(tmp_path / "there")
    young = started(tmp_path / "young", age_s=60.0)
    unmounted = started(tmp_path / "disk" / "c")
    other_disk = started(tmp_path / "other")
    changed(other_disk, device=1)
    held = started(tmp_path / "held")
    closed = started(tmp_path / "closed")
    unregister(closed.root)
    age(closed, 7200.0)
    for paths in (gone, young, other_disk, held, closed):
        shutil.rmtree(paths.root)
    shutil.rmtree(tmp_path / "disk")
    age(other_disk, 7200.0)
    with held.keeper_lock.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prune()
    assert not cluster_folder(gone.root).exists()
    assert not cluster_folder(closed.root).exists()
    for paths in (there, young, unmounted, other_disk, held):
        assert paths.store.exists(), paths.root
    prune()
    assert not cluster_folder(held.root).exists()


def test_a_month_after_the_last_write_only_an_open_cluster_keeps_its_folder(
    tmp_path: Path,
) -> None:
    month_s = 31 * 86_400.0
    closed, young = started(tmp_path / "closed"), started(tmp_path / "young")
    for paths in (closed, young):
        unregister(paths.root)
    open_one, held = started(tmp_path / "open"), started(tmp_path / "held")
    unmounted, broken_off = started(tmp_path / "disk" / "c"), started(tmp_path / "broken-off")
    held.store.unlink()
    broken_off.store.unlink()
    shutil.rmtree(tmp_path / "disk")
    nameless = tmp_path / os.fsdecode(b"\xff")
    escaped = started(nameless)
    for paths in (closed, open_one, held, unmounted, broken_off, escaped):
        age(paths, month_s)
    with held.keeper_lock.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prune()
    kept = {paths.root for paths in (open_one, young, held, escaped)}
    every = (closed, young, open_one, held, unmounted, broken_off, escaped)
    assert {paths.root for paths in every if cluster_folder(paths.root).exists()} == kept
    assert registered(open_one.root).path == str(open_one.root)


def test_an_entry_that_names_another_place_removes_nothing(tmp_path: Path) -> None:
    paths = started(tmp_path / "c")
    changed(paths, path=str(tmp_path / "never"))
    age(paths, 7200.0)
    prune()
    assert paths.store.exists()


def test_a_folder_that_takes_no_store_is_said(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    paths = ClusterPaths(tmp_path / "c")
    make_cluster_folder(paths.root)
    (paths.store / "file").mkdir(parents=True)
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
        register(paths, STORED)
