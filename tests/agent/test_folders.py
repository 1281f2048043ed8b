"""A run's folder on a pod, made and listed. No process."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from workbench.agent.folders import Entry, list_outputs, stage

ALL = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pod" / "runs" / "r1"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "script.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("train.py", "print()\n")
        packed.writestr("data/rows.txt", "aaaa\n")
    return path


def names(entries: Sequence[Entry]) -> list[str]:
    return [name for name, _, _ in entries]


def listed(folder: Path, archive: Path, below: int = ALL) -> dict[str, Any]:
    return dict(list_outputs(folder / "out", folder / "script" / "own", archive, below))


def test_a_folder_is_for_its_owner_alone(folder: Path, archive: Path) -> None:
    assert stage(folder, {"job.json": "{}", "../../evil": "here"}, str(archive), "own") == {}
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "out")] == [0o700, 0o700]
    assert (folder / "job.json").read_text() == "{}"
    # No name leads out of the folder.
    assert (folder / "evil").read_text() == "here"
    assert (folder / "script" / "own" / "data" / "rows.txt").read_text() == "aaaa\n"


def test_a_second_attempt_finds_the_folder_of_the_first(folder: Path) -> None:
    stage(folder, {"job.json": "1"}, "")
    (folder / "out" / "model").touch()
    folder.chmod(0o755)
    stage(folder, {"job.json": "2"}, "")
    assert (folder / "job.json").read_text() == "2" and (folder / "out" / "model").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (folder / "script").exists()


def test_what_was_sent_is_no_output_unless_it_changed(folder: Path, archive: Path) -> None:
    stage(folder, {}, str(archive), "own")
    assert listed(folder, archive) == {"out": [], "script": [], "links": [], "unread": []}
    # One file has another size, the other as many bytes as before.
    (folder / "script" / "own" / "train.py").write_text("print(1)\n")
    (folder / "script" / "own" / "data" / "rows.txt").write_text("aaab\n")
    assert names(listed(folder, archive)["script"]) == ["train.py", "data/rows.txt"]
    assert names(listed(folder, Path("missing"))["script"]) == ["train.py", "data/rows.txt"]


def test_an_empty_file_that_was_not_sent_is_an_output(folder: Path, archive: Path) -> None:
    stage(folder, {}, str(archive), "own")
    (folder / "script" / "own" / "done").touch()
    (folder / "script" / "own" / "b").write_text("b")
    assert names(listed(folder, archive)["script"]) == ["b", "done"]


def test_a_large_file_that_was_sent_is_read_whole(folder: Path, tmp_path: Path) -> None:
    data = bytes(3 << 20)
    with zipfile.ZipFile(tmp_path / "large.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("rows", data)
    stage(folder, {}, str(tmp_path / "large.zip"), "own")
    assert listed(folder, tmp_path / "large.zip")["script"] == []
    (folder / "script" / "own" / "rows").write_bytes(data[:-1] + b"1")
    assert names(listed(folder, tmp_path / "large.zip")["script"]) == ["rows"]


def test_small_files_are_hashed_and_large_ones_on_their_way(folder: Path) -> None:
    stage(folder, {}, "")
    (folder / "out" / "small").write_text("abc")
    (folder / "out" / "large").write_text("abcd")
    digest = hashlib.sha256(b"abc").hexdigest()
    assert listed(folder, Path("-"), 4)["out"] == [("large", 4, ""), ("small", 3, digest)]


def test_files_are_listed_by_folder_in_the_order_of_names(folder: Path) -> None:
    stage(folder, {}, "")
    for name in ("b/2", "b/1", "a/c/3", "z"):
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).touch()
    assert names(listed(folder, Path("-"))["out"]) == ["z", "a/c/3", "b/1", "b/2"]


def test_caches_beside_a_script_are_no_outputs(folder: Path) -> None:
    for where in ("out", "script/own"):
        for name in ("__pycache__/x.pyc", ".git/HEAD", "kept/a", "b.pyc"):
            (folder / where / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / where / name).touch()
    found = listed(folder, Path("-"))
    assert names(found["script"]) == ["kept/a"]
    # In the folder of outputs the user's own choice counts.
    assert names(found["out"]) == ["b.pyc", ".git/HEAD", "__pycache__/x.pyc", "kept/a"]


def test_links_and_pipes_are_named_and_not_followed(folder: Path, tmp_path: Path) -> None:
    stage(folder, {}, "")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").touch()
    (folder / "script" / "own").mkdir(parents=True)
    (folder / "out" / "folder").symlink_to(tmp_path / "secret")
    (folder / "out" / "file").symlink_to(tmp_path / "secret" / "key")
    os.mkfifo(folder / "script" / "own" / "pipe")
    found = listed(folder, Path("-"))
    assert found == {"out": [], "script": [], "links": ["file", "folder", "pipe"], "unread": []}


def test_a_folder_that_a_rank_replaced_by_a_link_is_not_read(folder: Path, tmp_path: Path) -> None:
    stage(folder, {}, "")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "key").touch()
    (folder / "script").symlink_to(tmp_path)
    assert listed(folder, Path("-"))["links"] == ["own"]
    (folder / "script").unlink()
    (folder / "script").mkdir()
    (folder / "script" / "own").symlink_to(tmp_path / "own")
    assert listed(folder, Path("-"))["links"] == ["own"]


def test_unreadable_folders_and_files_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(folder, {}, "")
    for name in ("out/closed", "out/open", "script/own/closed"):
        (folder / name).mkdir(parents=True)
    (folder / "out" / "open" / "a").touch()
    (folder / "out" / "open" / "b").touch()
    scandir = os.scandir

    def scan(path: Path) -> object:
        if path.name == "closed":
            raise PermissionError
        return scandir(path)

    def digest(path: Path) -> str:
        if path.name == "b":
            raise OSError("an error of the disk")
        return "d"

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr("workbench.base.package.file_digest", digest)
    found = listed(folder, Path("-"))
    assert found["out"] == [("open/a", 0, "d")]
    assert found["unread"] == ["closed", "open/b", "closed"]
