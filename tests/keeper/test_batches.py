"""Many small files in one stream: whole, continued after a break, and only where the list says."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from tests.support.sentences import sentence
from workbench.agent.folders import list_outputs
from workbench.base.errors import RemoteError
from workbench.keeper.run import batches
from workbench.keeper.run.batches import OutputFile, fetch_files
from workbench.pods.pod import Pod
from workbench.pods.ssh.bulk.transfer import SshRoute, far_end_argv, fetch_file
from workbench.pods.ssh.login import marked

COUNT, SIZE = 500, 20_001


class OwnLine:
    """A line to this very machine, which is cut once after `cut_at` bytes."""

    def __init__(self, folder: Path, cut_at: int = 0) -> None:
        self.pod = Pod(name="pod-0", address="127.0.0.2")
        self.folder, self.cut_at = folder, cut_at
        self.fresh = False
        self.begun: list[int] = []
        """Bytes that were over as each line began."""
        self.alone: list[str] = []

    def command(self, argv: Sequence[str]) -> list[str]:
        self.fresh = True
        return ["setsid", "sh", "-c", f'echo $$ > {self.folder}/pid; exec "$@"', "sh", *argv]

    def tell(self, done: int, _size: int) -> None:
        if self.fresh:
            self.fresh = False
            self.begun.append(done)
        elif self.cut_at and done >= self.cut_at:
            self.cut_at = 0
            os.killpg(int((self.folder / "pid").read_text()), signal.SIGKILL)

    def get_many(self, folder: str, names: Sequence[str], local: Path) -> None:
        route = SshRoute(
            name="pod-0",
            host="127.0.0.2",
            login="127.0.0.2",
            python=sys.executable,
            command=self.command,
        )
        fetch_file(route, folder, local, self.tell, names)

    def get(self, remote: str, local: Path) -> str:
        self.alone.append(PurePosixPath(remote).name)
        local.write_bytes(Path(remote).read_bytes())
        return hashlib.sha256(local.read_bytes()).hexdigest()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    for number in range(COUNT):
        file = folder / f"step-{number % 7}" / f"a file's «{number}».json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(hashlib.shake_128(b"%d" % number).digest(number % 3 and SIZE))
    return folder


def listed(there: Path) -> list[OutputFile]:
    return [
        OutputFile(*entry)
        for entry in list_outputs(there, there / "none", there / "none", 1 << 23)["out"]
    ]


def fetch(line: OwnLine, there: Path, here: Path, files: Sequence[OutputFile]) -> dict[str, str]:
    come = [(file, here / file.name) for file in files]
    arrived = fetch_files(line, PurePosixPath(there), come, here / ".pile")  # type: ignore[arg-type]
    return {file.name: digest for file, digest in arrived}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_five_hundred_files_come_in_one_stream_which_goes_on_where_it_was_cut(
    there: Path, tmp_path: Path
) -> None:
    line, files = OwnLine(tmp_path, cut_at=3 << 20), listed(there)
    assert fetch(line, there, tmp_path / "here", files) == {
        file.name: file.digest for file in files
    }
    assert contents(tmp_path / "here") == contents(there)
    assert line.alone == []
    first, again = line.begun
    assert (first, again >= 2 << 20) == (0, True), (
        "the second line began where the first had broken"
    )


def test_a_later_try_goes_on_from_what_the_one_before_left(there: Path, tmp_path: Path) -> None:
    line, files, here = OwnLine(tmp_path), listed(there), tmp_path / "here"
    here.mkdir()
    whole = b"".join((there / file.name).read_bytes() for file in files)
    (here / "..pile.part").write_bytes(whole[: 4 << 20])
    fetch(line, there, here, files)
    assert line.begun == [4 << 20]
    assert contents(here) == contents(there)


def test_what_is_not_as_the_list_says_comes_alone_and_a_pod_that_lies_is_not_believed(
    there: Path, tmp_path: Path
) -> None:
    line, here = OwnLine(tmp_path), tmp_path / "here"
    files = [file for file in listed(there) if file.size][:30]
    # Since the list was made one file has grown, so that all
    # behind it are elsewhere in the stream; one never was so.
    listed_so = (there / files[4].name).read_bytes()
    (there / files[4].name).write_bytes(listed_so + b"more")
    files[12] = OutputFile(files[12].name, files[12].size, "0" * 64)
    with pytest.raises(RemoteError, match=sentence("times with a wrong checksum", "pod-0 3")):
        fetch(line, there, here, files)
    assert contents(here) == {
        file.name: (there / file.name).read_bytes() for file in files[:12]
    } | {files[4].name: listed_so}
    assert line.alone == [
        PurePosixPath(file.name).name for file in (*files[5:12], *[files[12]] * 3)
    ]


def test_a_file_that_has_gone_is_named(there: Path, tmp_path: Path) -> None:
    line, files = OwnLine(tmp_path), listed(there)
    (there / files[30].name).unlink()
    with pytest.raises(
        RemoteError,
        match=sentence(
            "{} ({}) says: {}",
            "pod-0",
            "No such file or directory",
            "a file's «",
            "».json",
        ),
    ):
        fetch(line, there, tmp_path / "here", files)
    assert not {file.name for file in files} & contents(tmp_path / "here").keys()


class Folder:
    """A line to a folder of this machine that notes the files of every stream."""

    def __init__(self) -> None:
        self.pod = Pod(name="pod-0", address="127.0.0.2")
        self.streams: list[list[str]] = []
        self.alone: list[str] = []
        self.wrong = 0
        """Number of next copies of single files that are damaged."""

    def get_many(self, folder: str, names: Sequence[str], local: Path) -> None:
        self.streams.append(list(names))
        local.write_bytes(b"".join((Path(folder) / name).read_bytes() for name in names))

    def get(self, remote: str, local: Path) -> str:
        self.alone.append(PurePosixPath(remote).name)
        data = Path(remote).read_bytes()
        if self.wrong:
            self.wrong -= 1
            data += b"?"
        local.write_bytes(data)
        return hashlib.sha256(data).hexdigest()


class Copy:
    """Files of some sizes on a pod, and their copies."""

    def __init__(self, root: Path, sizes: dict[str, int]) -> None:
        self.link = Folder()
        self.there = root / "there"
        self.here = root / "here"
        self.files: list[OutputFile] = []
        for folder in (self.there, self.here):
            folder.mkdir()
        for name, size in sizes.items():
            data = name[:1].encode() * size
            (self.there / name).write_bytes(data)
            self.files.append(OutputFile(name, size, hashlib.sha256(data).hexdigest()))

    def fetch(self) -> list[tuple[OutputFile, str]]:
        files = [(file, self.here / "sub" / file.name) for file in self.files]
        pile = self.here / "pile"
        fetched = [*fetch_files(self.link, PurePosixPath(self.there), files, pile)]  # type: ignore[arg-type]
        assert not pile.exists()
        return fetched

    def is_whole(self) -> bool:
        whole = True
        for file in self.files:
            copy = self.here / "sub" / file.name
            whole = whole and copy.read_bytes() == (self.there / file.name).read_bytes()
        return whole


@pytest.mark.parametrize(
    ("most_bytes", "most_letters", "streams"),
    [
        (100, 100, ["abcdef"]),
        # Ten bytes a file: three files fill a stream to the last byte.
        (30, 100, ["abc", "def"]),
        (29, 100, ["ab", "cd", "ef"]),
        # A name of one letter, and a separator.
        (100, 6, ["abc", "def"]),
        (100, 5, ["ab", "cd", "ef"]),
        (100, 1, ["a", "b", "c", "d", "e", "f"]),
        (9, 100, ["a", "b", "c", "d", "e", "f"]),
    ],
)
def test_a_stream_holds_as_many_files_as_its_bytes_and_its_command_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most_bytes: int,
    most_letters: int,
    streams: list[str],
) -> None:
    monkeypatch.setattr(batches, "_FEWEST", 1)
    monkeypatch.setattr(batches, "_MOST_BYTES", most_bytes)
    monkeypatch.setattr(batches, "_MOST_LETTERS", most_letters)
    copy = Copy(tmp_path, dict.fromkeys("abcdef", 10))
    assert len(copy.fetch()) == 6
    assert copy.link.streams == [list(names) for names in streams]
    assert copy.link.alone == [] and copy.is_whole()


def test_the_longest_command_of_a_stream_is_one_that_a_login_shell_takes() -> None:
    names = ["'" * 199] * (batches._MOST_LETTERS // 200)
    argv, _ = marked(far_end_argv("/" + "p" * 1000, "send", "/" + "d" * 2000, "0", *names))
    assert len(shlex.join(argv)) < 128 << 10, "Linux's limit of an argument"


def test_few_files_and_large_files_come_singly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_FEWEST", 3)
    monkeypatch.setattr(batches, "LARGE", 10)
    few = Copy(tmp_path, {"a": 9, "b": 9, "c": 10})
    few.files.append(replace(few.files[0], digest=""))
    fetched = few.fetch()
    assert few.link.streams == [] and sorted(few.link.alone) == ["a", "a", "b", "c"]
    assert [digest for _, digest in fetched] == [
        hashlib.sha256((few.there / file.name).read_bytes()).hexdigest() for file, _ in fetched
    ]
    assert few.is_whole()


def test_a_file_that_arrives_damaged_is_fetched_again_and_three_times_at_most(
    tmp_path: Path,
) -> None:
    copy = Copy(tmp_path, {"a": 9})
    copy.link.wrong = 2
    assert len(copy.fetch()) == 1 and copy.is_whole()
    assert copy.link.alone == ["a"] * 3
    copy.link.wrong = 3
    with pytest.raises(RemoteError, match=sentence("times with a wrong checksum", "pod-0", 3)):
        copy.fetch()
    assert [path.name for path in (copy.here / "sub").iterdir()] == ["a"], "no part is left"


def test_a_file_that_changed_after_the_list_comes_singly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_FEWEST", 1)
    copy = Copy(tmp_path, {"a": 9, "b": 9, "c": 9})
    copy.files[1] = replace(copy.files[1], digest=hashlib.sha256(b"B" * 9).hexdigest())
    copy.link.get = lambda remote, local: local.write_bytes(b"B" * 9)  # type: ignore[assignment, method-assign]
    assert [file.name for file, _ in copy.fetch()] == ["a", "c", "b"]
    assert (copy.here / "sub" / "b").read_bytes() == b"B" * 9
