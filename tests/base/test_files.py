"""Files are replaced whole, and nobody else can read them."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from workbench.base import files
from workbench.base.errors import ConfigError, RunError, Unreadable
from workbench.base.files import (
    KeptFile,
    check_working_directory,
    is_missing,
    load_json,
    not_ours,
    read_json,
    read_known,
    read_text,
    records,
    user_path,
    write_json,
    write_text,
)
from workbench.base.files.folders import remove_empty, remove_file
from workbench.base.files.records import facts_of, size_of, try_files, try_folders, try_read


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
    (run / "file").touch()
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
        ("file/a.json", "its folder is a file"),
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
            load_json(run / name)
        assert str(refused.value).startswith(f"{run / name} cannot be read: ")
        assert why in str(refused.value), name
        assert read_json(run / name) == {}


def test_what_the_system_cannot_say_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    assert is_missing(path)
    assert is_missing(tmp_path / "nul\0.json")
    write_json(path, {"a": 1})
    assert not is_missing(path)
    assert read_known(path) == {"a": 1}
    assert read_known(tmp_path / "none.json") == {}

    def fail(*_args: object, **_options: object) -> NoReturn:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(Unreadable) as refused:
        is_missing(path)
    assert str(refused.value) == f"{path} cannot be read at this moment: the disk is gone"
    monkeypatch.undo()
    monkeypatch.setattr(files, "read_bytes", fail)
    for read in (load_json, read_known):
        with pytest.raises(Unreadable, match="cannot be read at this moment: the disk is gone"):
            read(path)
    assert read_json(path) == {}


def test_an_error_without_a_number_or_words_is_told_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, words in (
        (OSError(errno.EFBIG, "too large"), "too large"),
        (OSError(errno.EFBIG, None), f"[Errno {errno.EFBIG}] None"),
    ):

        def fail(*_args: object, _error: OSError = error) -> NoReturn:
            raise _error

        monkeypatch.setattr(files, "read_bytes", fail)
        with pytest.raises(RunError) as refused:
            load_json(tmp_path / "a.json")
        assert f"cannot be read: {words}; put back" in str(refused.value)


def test_a_deleted_working_directory_and_a_missing_home_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_working_directory()
    assert user_path("~/a") == Path.home() / "a"
    with pytest.raises(ConfigError, match="begins with a home folder that is not there"):
        user_path("~nobody-of-this-name/a")


def test_a_kept_file_is_put_back_and_only_a_beat_renews_its_time(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    kept = KeptFile(path)
    kept.mend()
    assert not path.exists(), "nothing was written yet"
    kept.write({"a": 1})
    for spoil in (path.unlink, lambda: path.write_text("{}"), lambda: write_json(path, {"a": 3})):
        spoil()
        kept.mend()
        assert read_json(path) == {"a": 1}
    os.utime(path, ns=(1, 1))
    kept.mend()
    assert path.stat().st_mtime_ns > 1, "another time is another file"
    before = path.stat()
    kept.mend()
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    kept.mend(beat=True)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns > before.st_mtime_ns) == (before.st_ino, True)
    kept.mend()
    assert path.stat().st_mtime_ns == after.st_mtime_ns, "the beat was our own"


def test_paths_of_others_and_files_that_others_may_change_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(0o600)
    assert not_ours(path) == ""
    path.chmod(0o602)
    assert not_ours(path) == f"{path} belongs to another user, or others may write to it"
    path.chmod(0o600)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        assert not_ours(path) != ""


def test_the_run_directory_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "inputs").mkdir(parents=True)
    write_json(tmp_path / "real" / "inputs" / "job.json", {"a": 1})
    (tmp_path / "newest").symlink_to("real")
    assert read_json(tmp_path / "newest" / "inputs" / "job.json") == {"a": 1}
    assert read_text(tmp_path / "newest" / "inputs" / "job.json") == '{\n "a": 1\n}\n'


def test_every_record_that_is_written_can_be_read(tmp_path: Path) -> None:
    """A rank chose the words of its error, and half of a surrogate pair is no text."""
    path = tmp_path / "result.json"
    write_json(path, {"message": "a\ud800b", "other": "\U0001f600 \\ud800"})
    assert load_json(path) == {"message": "a?b", "other": "\U0001f600 \\ud800"}


def test_a_file_that_cannot_be_seen_counts_as_missing(tmp_path: Path) -> None:
    file, link, gone = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    file.write_bytes(b"12345")
    link.symlink_to(file)
    for path, content, size in ((file, b"12345", 5), (gone, None, 0), (tmp_path, None, None)):
        assert try_read(path) == content
        if size is not None:
            assert size_of(path) == size
    assert try_read(link) is None, "a link is not followed"
    assert size_of(link) == link.lstat().st_size
    facts = facts_of(link)
    assert facts is not None and stat.S_ISLNK(facts.st_mode)
    for path in (gone, tmp_path / "a" / "below a file", tmp_path / ("x" * 300)):
        assert facts_of(path) is None
        assert try_read(path) is None


def test_what_cannot_be_removed_stays_and_is_told(tmp_path: Path) -> None:
    file, folder = tmp_path / "folder" / "file", tmp_path / "folder"
    folder.mkdir()
    file.touch()
    assert not remove_empty(folder)
    assert not remove_file(folder), "a folder is no file"
    assert file.exists()
    assert remove_file(file)
    assert remove_file(file), "nothing is there any more"
    assert remove_empty(folder)
    assert not remove_empty(folder)


def test_a_folder_with_too_many_names_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.txt").touch()
    assert try_files(tmp_path, "a*") == [tmp_path / "a.txt"]
    assert try_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert try_files(tmp_path / "none") == try_folders(tmp_path / "a.txt") == []
    monkeypatch.setattr(records, "MOST_NAMES", 3)
    assert try_files(tmp_path) == try_folders(tmp_path) == []
