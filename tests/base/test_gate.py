"""No name in a foreign folder holds a reader, reads a device, or leads a writer elsewhere."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.deep import deep_tree
from tests.support.writtenrun import write_run
from workbench.base.errors import RunError
from workbench.base.files import gate, records
from workbench.base.files.folders import remove_folder

SPARSE = 2 << 30


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("mine\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "plain").write_text("text\n")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "outside" / "secret")


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may have 107 bytes
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


NO_FILE: tuple[Callable[[Path], None], ...] = (
    link,
    link_to_device,
    os.mkfifo,
    listening_socket,
    folder,
)


def append_there(path: Path, root: Path) -> None:
    with gate.pinned_folder(path.parent, root) as folder:
        records.open_to_append(folder / path.name).close()


BY_PATH: tuple[Callable[[Path], object], ...] = (
    records.open_record,
    records.read_bytes,
    records.read_text,
    records.sha256_of,
    records.open_to_append,
)
BELOW: tuple[Callable[[Path, Path], object], ...] = (
    gate.open_within,
    gate.read_within,
    append_there,
)


@pytest.mark.parametrize("make", NO_FILE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("use", BY_PATH, ids=lambda use: use.__name__)
def test_only_a_regular_file_is_opened(
    root: Path, outside: Path, use: Callable[[Path], object], make: Callable[[Path], None]
) -> None:
    path = root / "logs" / "evil"
    make(path)
    for odd in (path, root / "a\0b"):
        with pytest.raises(OSError):
            use(odd)
    assert (outside / "secret").read_text() == "mine\n"


@pytest.mark.parametrize("make", NO_FILE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("use", BELOW, ids=lambda use: use.__name__)
def test_only_a_regular_file_is_opened_below_a_root(
    root: Path, outside: Path, use: Callable[[Path, Path], object], make: Callable[[Path], None]
) -> None:
    path = root / "logs" / "evil"
    make(path)
    with pytest.raises(OSError):
        use(path, root)
    assert (outside / "secret").read_text() == "mine\n"


@pytest.mark.parametrize("use", BELOW, ids=lambda use: use.__name__)
def test_no_folder_on_the_way_is_a_link(
    root: Path, outside: Path, use: Callable[[Path, Path], object]
) -> None:
    (root / "away").symlink_to(outside)
    with pytest.raises(OSError):
        use(root / "away" / "secret", root)
    assert (outside / "secret").read_text() == "mine\n"


@pytest.mark.parametrize("use", BELOW, ids=lambda use: use.__name__)
def test_no_path_leads_out_of_the_root(
    root: Path, outside: Path, use: Callable[[Path, Path], object]
) -> None:
    for path in (root / ".." / "outside" / "secret", outside / "secret", root / "a\0b"):
        with pytest.raises(OSError):
            use(path, root)
    assert (outside / "secret").read_text() == "mine\n"


def test_a_file_of_any_size_is_read_to_the_limit_only(root: Path) -> None:
    sparse(root / "big")
    with pytest.raises(OSError, match="MiB"):
        records.read_bytes(root / "big")
    with pytest.raises(OSError, match="MiB"):
        gate.read_within(root / "big", root)
    assert gate.read_within(root / "logs" / "plain", root, limit=5) == b"text\n"
    with pytest.raises(OSError):
        records.read_bytes(root / "logs" / "plain", limit=4)


@pytest.mark.parametrize("make", NO_FILE[:-1], ids=lambda make: make.__name__)
def test_a_replaced_file_is_a_regular_one_in_its_folder(
    root: Path, outside: Path, make: Callable[[Path], None]
) -> None:
    path = root / "logs" / "evil"
    make(path)
    records.write_bytes(path, b"new")
    assert not path.is_symlink() and path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert (outside / "secret").read_text() == "mine\n"
    assert names(root / "logs") == ["evil", "plain"]


def test_a_folder_is_not_replaced_and_no_part_stays(root: Path) -> None:
    (root / "taken").mkdir()
    with pytest.raises(OSError):
        records.write_text(root / "taken", "new")
    assert names(root) == ["logs", "taken"]


def test_a_linked_folder_is_not_written_into(root: Path, outside: Path) -> None:
    (root / "away").symlink_to(outside)
    remove_folder(root / "away")
    with pytest.raises(RunError):
        gate.make_folders(root / "away" / "deep", root)
    assert names(outside) == ["secret"]


def test_a_listing_has_regular_files_alone(root: Path) -> None:
    for make in NO_FILE:
        make(root / "logs" / f"evil-{make.__name__}")
    assert records.files_in(root / "logs") == [root / "logs" / "plain"]
    assert records.files_in(root / "logs", "evil-*") == []
    assert records.folders_in(root / "logs") == [root / "logs" / "evil-folder"]
    (root / "logs" / "evil-folder" / "deep").write_text("")
    assert records.files_below(root / "logs") == [
        root / "logs" / "evil-folder" / "deep",
        root / "logs" / "plain",
    ]


def test_a_linked_or_missing_folder_has_no_names(root: Path, outside: Path) -> None:
    (root / "away").symlink_to(outside)
    for listing in (records.files_in, records.folders_in, records.files_below):
        for name in ("away", "none", "logs/plain"):
            assert listing(root / name) == []


def test_a_listing_ends_at_the_cap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gate, records):
        monkeypatch.setattr(module, "MOST_NAMES", 3)
    for number in range(3):
        (root / "logs" / f"more-{number}").touch()
    for listing in (records.files_in, records.files_below):
        with pytest.raises(OSError, match="more than 3"):
            listing(root / "logs")
    with pytest.raises(OSError, match="more than 3"):
        gate.library(root / "logs")


def test_a_file_where_a_folder_is_needed_is_named(root: Path) -> None:
    with pytest.raises(RunError, match="plain is a link or a file"):
        gate.make_folders(root / "logs" / "plain" / "deep", root)
    gate.make_folders(root / "a" / "b", root)
    assert (root / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("make", NO_FILE[:-1], ids=lambda make: make.__name__)
def test_no_library_gets_a_folder_with_a_link_or_a_pipe(
    root: Path, make: Callable[[Path], None]
) -> None:
    assert gate.library(root) == str(root)
    make(root / "logs" / "evil")
    with pytest.raises(RunError, match="evil"):
        gate.library(root)
    with pytest.raises(RunError, match="evil"):
        gate.library(root / "logs" / "evil")


def test_a_folder_stays_while_another_takes_its_place(root: Path, outside: Path) -> None:
    with gate.pinned_folder(root / "logs", root) as folder:
        (root / "logs").rename(root / "before")
        (root / "logs").symlink_to(outside)
        records.write_bytes(folder / "new", b"x")
        (folder / "new").replace(folder / "newer")
    assert names(root / "before") == ["newer", "plain"]
    assert names(outside) == ["secret"]


def test_views_of_a_folder_with_too_many_names_show_the_rest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.rundir.figures.flight import flights
    from workbench.rundir.view import RunView

    run = write_run(root.with_name("written")).paths
    monkeypatch.setattr(records, "MOST_NAMES", 2)
    for number in range(5):
        (run.logs / f"rank-{number}.stdout.log").touch()
    assert RunView(run.root).ranks == [] and flights(run) == []


@pytest.mark.parametrize("place", ["outputs", "tensorboard"])
def test_tensorboard_gets_no_folder_with_a_link_or_a_pipe(root: Path, place: str) -> None:
    from workbench.client.tensorboard.board import board_folder
    from workbench.rundir.paths import RunPaths

    paths = RunPaths(root)
    assert board_folder(paths) == paths.tensorboard
    (root / "outputs").mkdir()
    (root / "outputs" / "events.out.tfevents.1").touch()
    (root / "tensorboard").mkdir()
    assert board_folder(paths) == root
    os.mkfifo(root / place / "events.out.tfevents.2")
    with pytest.raises(RunError, match=f"{place}/events.out.tfevents.2"):
        board_folder(paths)


def test_a_tree_of_any_depth_is_removed_and_no_link_is_followed(root: Path, outside: Path) -> None:
    with deep_tree(root / "logs" / "tree") as tree:
        (tree / "d" / "d" / "link").symlink_to(outside)
        (root / "logs" / "link").symlink_to(outside)
        (root / "logs" / "empty").mkdir()
        remove_folder(root / "logs")
        assert names(root) == []
    assert (outside / "secret").read_text() == "mine\n"


class Disk:
    """What a disk without power would have: the files and folders that were synced, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        real = os.fsync

        def fsync(handle: int) -> None:
            self.synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


def test_a_record_is_on_the_disk_before_its_name_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    renamed: list[int] = []
    real = os.replace

    def replace(*args: Any, **options: Any) -> None:
        renamed.append(len(disk.synced))
        real(*args, **options)

    monkeypatch.setattr(os, "replace", replace)
    records.write_bytes(tmp_path / "a", b"1")
    assert renamed == [1]
    assert disk.synced[0].startswith(f"{tmp_path}/.a.")
    assert disk.synced[1:] == [str(tmp_path)]


def test_all_files_of_a_folder_are_synced_and_no_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    (root / "logs").mkdir(parents=True)
    (tmp_path / "outside").write_text("1")
    (root / "a").write_text("1")
    (root / "logs" / "b").write_text("1")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    disk = Disk(monkeypatch)
    records.sync_below(root)
    names = [Path(path).relative_to(tmp_path).as_posix() for path in disk.synced]
    assert names == ["run/logs/b", "run/logs", "run/a", "run"]


def test_a_folder_that_cannot_be_synced_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    records.write_bytes(tmp_path / "a", b"1")
    assert (tmp_path / "a").read_bytes() == b"1"

    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        records.write_bytes(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(OSError, match="Input/output error"):
        records.sync_below(tmp_path)
