from __future__ import annotations

import bz2
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.wikisql.archive import unpack

WANTED = ("train.jsonl", "dev.jsonl")


def member(name: str, content: bytes = b"", **attributes: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in attributes.items():
        setattr(info, key, value)
    return info, content


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:bz2", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def test_wanted_files_come_out_and_others_do_not(tmp_path: Path) -> None:
    folder, good, other = (
        member("data", type=tarfile.DIRTYPE),
        member("data/train.jsonl", b"{}\n"),
        member("data/a.db"),
    )
    path = archive(tmp_path / "data.tar.bz2", folder, good, other)
    found = unpack(path, tmp_path / "out", WANTED)
    assert found == {"train.jsonl": tmp_path / "out" / "train.jsonl"}
    assert found["train.jsonl"].read_bytes() == b"{}\n"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["train.jsonl"]


EVIL = {
    "up": [member("../canary", b"x")],
    "wanted up": [member("../dev.jsonl", b"x")],
    "absolute": [member("/tmp/dev.jsonl", b"x")],
    "symlink": [member("data", type=tarfile.SYMTYPE, linkname=".."), member("data/canary", b"x")],
    "wanted symlink": [member("dev.jsonl", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "hardlink": [member("dev.jsonl", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    # CVE-2025-4517's shape: a link whose target is reached through another.
    "hardlink to symlink": [
        member("a", type=tarfile.SYMTYPE, linkname="../canary"),
        member("dev.jsonl", type=tarfile.LNKTYPE, linkname="a"),
    ],
    "device": [member("dev.jsonl", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "fifo": [member("dev.jsonl", type=tarfile.FIFOTYPE)],
    "pax name": [member("dev.jsonl", b"x", pax_headers={"path": "../dev.jsonl"})],
}


@pytest.mark.parametrize("shape", EVIL)
def test_no_member_leaves_the_folder_or_is_a_link(tmp_path: Path, shape: str) -> None:
    path = archive(tmp_path / "data.tar.bz2", member("train.jsonl", b"{}"), *EVIL[shape])
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    found = unpack(path, folder / "out", WANTED)
    assert {target.parent for target in found.values()} == {folder / "out"}
    assert found["train.jsonl"].read_bytes() == b"{}"
    if "dev.jsonl" in found:
        assert (found["dev.jsonl"].read_bytes(), found["dev.jsonl"].is_symlink()) == (b"x", False)
    outside = {"data.tar.bz2", "deep", "er", "out"}
    assert {p.name for p in tmp_path.rglob("*")} <= outside | set(WANTED)
    assert not Path("/tmp/dev.jsonl").exists()


REFUSED = {
    "twice": [member("a/train.jsonl", b"x"), member("b/train.jsonl", b"y")],
    "huge": [member("train.jsonl", b"x", pax_headers={"size": str(2**40)})],
    "negative": [member("other", b"x", pax_headers={"size": "-512"}), member("train.jsonl", b"x")],
    "a large hole": [
        member(
            "train.jsonl",
            b"0\n",
            pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "99999999999"},
        )
    ],
}


@pytest.mark.parametrize("shape", REFUSED)
def test_a_refused_archive_leaves_nothing(tmp_path: Path, shape: str) -> None:
    path = archive(tmp_path / "data.tar.bz2", member("first.jsonl", b"{}"), *REFUSED[shape])
    with pytest.raises(ConfigError, match=r"is refused|has 'train.jsonl' twice|is not a whole"):
        unpack(path, tmp_path / "out", (*WANTED, "first.jsonl"))
    assert [p.name for p in tmp_path.rglob("*")] == ["data.tar.bz2"]


def test_a_bomb_is_stopped_by_what_comes_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.finetune.data.wikisql.archive.MAX_BYTES", 4 * 2**20)
    path = archive(tmp_path / "data.tar.bz2", *(member(f"x{i}", bytes(2**20)) for i in range(8)))
    assert path.stat().st_size < 2000
    with pytest.raises(
        ConfigError,
        match=sentence("is refused: decompressed, the archive has more than {} bytes", 4194304),
    ):
        unpack(path, tmp_path / "out", WANTED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[: len(b) // 2],
        lambda _: b"",
        lambda _: b"PK\x03\x04zip",
        lambda _: bz2.compress(b"no tar" * 200),
    ],
    ids=["cut", "empty", "zip", "no tar"],
)
def test_a_broken_archive_is_said_to_be_one(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    path = archive(tmp_path / "data.tar.bz2", member("train.jsonl", os.urandom(100_000)))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(
        ConfigError, match=sentence("is not a whole .tar.bz2 archive", "data.tar.bz2")
    ):
        unpack(path, tmp_path / "out", WANTED)
    assert not (tmp_path / "out").exists()


def test_every_byte_cut_or_flipped_is_our_error_or_no_harm(tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for info, content in (member("train.jsonl", b"a" * 700), member("data/dev.jsonl", b"b")):
            tar.addfile(info, io.BytesIO(content))
    plain = whole.getvalue()
    for position in range(0, 2048, 11):
        flipped = bytearray(plain)
        flipped[position] ^= 0x81
        path = tmp_path / "data.tar.bz2"
        path.write_bytes(bz2.compress(bytes(flipped)))
        try:
            found = unpack(path, tmp_path / "out", WANTED)
        except ConfigError:
            assert not (tmp_path / "out").exists()
            continue
        assert all(p.parent == tmp_path / "out" for p in found.values())
        for p in (tmp_path / "out").iterdir():
            p.unlink()
        (tmp_path / "out").rmdir()
