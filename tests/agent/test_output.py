"""What ranks write goes by a pipe into logs; a full disk keeps it in memory, then drops it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench.agent.ranks.output import OutputPump, OutputStream, read_chunks
from workbench.agent.ranks.records import keep_room, read_record, write_record

MIB = 1 << 20
PROGRAM = (
    "import sys; from pathlib import Path; from workbench.base.process import open_output; "
    "open_output([Path({!r}, name) for name in ('stdout.log', 'stderr.log')])\n"
)


@pytest.fixture
def pump() -> OutputPump:
    return OutputPump()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "output", str(path)], check=True
    )
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def write(folder: Path, code: str) -> int:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(str(folder)) + code], timeout=300
    ).returncode


def fill(disk: Path) -> None:
    facts = os.statvfs(disk)
    with (disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, facts.f_bavail * facts.f_frsize)


def test_a_burst_of_20_mb_arrives_byte_for_byte(tmp_path: Path, pump: OutputPump) -> None:
    stream = OutputStream(tmp_path / "stdout.log", "stdout")
    pump.add(stream)
    code = (
        "data = bytes(range(256)) * 4096\nfor _ in range(20): "
        "sys.stdout.buffer.write(data)\nsys.stdout.flush()"
    )
    assert write(tmp_path, code) == 0
    pump.remove(stream)
    assert stream.log.read_bytes() == bytes(range(256)) * 4096 * 20
    assert not (tmp_path / "stdout.pipe").exists()
    assert stream.dropped == 0


def test_without_a_reader_a_rank_writes_into_its_log_itself(tmp_path: Path) -> None:
    assert write(tmp_path, "print('alone')") == 0
    assert (tmp_path / "stdout.log").read_bytes() == b"alone\n"
    os.mkfifo(tmp_path / "stdout.pipe")
    assert write(tmp_path, "print('again')") == 0
    assert (tmp_path / "stdout.log").read_bytes() == b"alone\nagain\n"


def test_a_second_attempt_goes_on_in_the_same_log(tmp_path: Path, pump: OutputPump) -> None:
    for word in ("first", "second"):
        stream = OutputStream(tmp_path / "stdout.log", "stdout")
        pump.add(stream)
        assert write(tmp_path, f"print('{word}')") == 0
        pump.remove(stream)
    assert (tmp_path / "stdout.log").read_bytes() == b"first\nsecond\n"


@pytest.mark.slow
def test_a_full_disk_costs_neither_the_rank_nor_a_line_that_is_read_in_time(
    disk: Path, pump: OutputPump
) -> None:
    stream = OutputStream(disk / "stdout.log", "stdout")
    pump.add(stream)
    assert write(disk, "print('before')") == 0
    until(lambda: stream.size == 7, 10)
    fill(disk)
    assert write(disk, "print('x' * 3_000_000)") == 0, "its own print must not fail"
    until(lambda: stream.size == 7 + 3_000_001, 10)
    got = b""
    while chunk := read_chunks({"a": stream}, {"a": len(got)}, MIB).get("a"):
        got += str(chunk["data"]).encode("latin-1")
    assert got == b"before\n" + b"x" * 3_000_000 + b"\n"
    assert stream.log.stat().st_size < MIB
    assert stream.dropped == 0
    assert write(disk, "print('y' * 3_000_000)") == 0, "what was read makes room for more"
    until(lambda: stream.size == len(got) + 3_000_001, 10)
    assert stream.read(len(got), 10) == b"y" * 10
    assert stream.tail().endswith("yyy\n")
    assert stream.dropped == 0
    pump.remove(stream)


@pytest.mark.slow
def test_what_nobody_reads_is_dropped_and_counted_and_what_follows_is_not(
    disk: Path, pump: OutputPump
) -> None:
    stream = OutputStream(disk / "stdout.log", "stdout")
    pump.add(stream)
    assert write(disk, "print('before')") == 0
    fill(disk)
    assert write(disk, "print('x' * 9_000_000)") == 0
    until(lambda: stream.size + stream.dropped == 7 + 9_000_001, 10)
    lost = stream.dropped
    assert 3_000_000 < lost < 6_000_000
    got = stream.size
    stream.read(got, 1)  # the keeper has it all
    assert write(disk, "print('after')") == 0
    until(lambda: stream.tail().endswith("after\n"), 10)
    assert (
        stream.read(got, 200)
        == f"\n[{lost} bytes are lost here: the disk was full]\nafter\n".encode()
    )
    pump.remove(stream)


def test_a_record_finds_the_room_that_was_kept_for_it(disk: Path) -> None:
    keep_room(disk)
    fill(disk)
    write_record(disk / "done.json", {"rank": 3})
    assert (read_record(disk / "done.json") or {})["rank"] == 3


def test_what_is_written_after_somebody_removed_the_log_is_read_all_the_same(
    tmp_path: Path, pump: OutputPump
) -> None:
    folder = tmp_path / "run" / "rank-0"
    folder.mkdir(parents=True)
    stream = OutputStream(folder / "stdout.log", "stdout")
    pump.add(stream)
    writer = os.open(folder / "stdout.pipe", os.O_WRONLY)
    os.write(writer, b"before\n")
    until(lambda: stream.size == 7)
    assert not stream.removed
    shutil.rmtree(tmp_path / "run")
    os.write(writer, b"after\n")
    until(lambda: stream.size == 13)
    assert stream.removed
    os.close(writer)
    pump.remove(stream)
    assert stream.read(0, 100) == b"before\nafter\n"
    assert stream.dropped == 0
