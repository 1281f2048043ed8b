"""A rank's output between pipe, log and memory, on disks that fill up. No process."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.poll import until
from workbench.agent.ranks import output
from workbench.agent.ranks.output import OutputOrder, OutputPump, OutputStream, read_chunks


class Disk:
    """A disk with room for some bytes more, and the clock of its readers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.most = 1 << 30
        """Bytes that a single call writes."""
        self.now_s = 100.0
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(output.time, "monotonic", lambda: self.now_s)  # type: ignore[attr-defined]

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "no space left")
        done = self._write(file, data[: min(self.room, self.most)], offset)
        self.room -= done
        return done


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk, beside a memory for 10 bytes."""
    monkeypatch.setattr(output, "_KEPT_BYTES", 10)
    return Disk(monkeypatch)


Write = Callable[[bytes], None]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[OutputStream]:
    made = OutputStream(tmp_path / "stdout.log", "stdout", OutputOrder(tmp_path / "order.log"))
    made.open()
    yield made
    made.close()


@pytest.fixture
def write(stream: OutputStream, tmp_path: Path) -> Iterator[Write]:
    """Write as a rank, and let the agent empty the pipe."""
    pipe = os.open(tmp_path / "stdout.pipe", os.O_WRONLY | os.O_NONBLOCK)

    def put(data: bytes) -> None:
        os.write(pipe, data)
        stream.drain()

    yield put
    os.close(pipe)


def test_pipe_and_log_are_for_their_owner_alone(stream: OutputStream, tmp_path: Path) -> None:
    assert stream.pipe >= 0 and (tmp_path / "stdout.pipe").is_fifo()
    for name in ("stdout.pipe", "stdout.log"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert (stream.size, stream.dropped, stream.read(0, 10)) == (0, 0, b"")


def test_output_arrives_in_the_log_and_is_read_by_offset(
    stream: OutputStream, write: Write
) -> None:
    write(b"first\n")
    write(b"second\n")
    assert stream.log.read_bytes() == b"first\nsecond\n"
    assert stream.size == 13
    assert stream.read(0, 100) == b"first\nsecond\n"
    assert stream.read(6, 3) == b"sec"
    assert stream.read(13, 10) == stream.read(99, 10) == b""
    assert stream.tail() == "first\nsecond\n"


def test_what_the_disk_does_not_take_stays_in_memory(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 4
    write(b"0123456789")
    assert stream.log.read_bytes() == b"0123"
    assert (stream.size, stream.dropped) == (10, 0)
    assert stream.read(0, 100) == b"0123456789"
    assert stream.read(2, 4) == b"2345"
    assert stream.read(4, 2) == b"45"
    assert stream.read(6, 3) == b"678"
    assert stream.read(10, 3) == b""
    write(b"ab")
    assert stream.read(8, 100) == b"89ab"


def test_a_disk_may_take_output_in_pieces(stream: OutputStream, write: Write, disk: Disk) -> None:
    disk.most = 3
    write(b"0123")
    write(b"456789ab")
    assert stream.log.read_bytes() == b"0123456789ab" == stream.read(0, 100)


def test_a_full_disk_is_reported_once(
    stream: OutputStream, write: Write, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.room = 0
    for _ in range(3):
        write(b"01")
        disk.now_s += 1.5
    assert len(caplog.records) == 1


def test_memory_goes_to_the_disk_a_second_after_the_failure(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 4
    write(b"0123456789")
    disk.room = 100
    stream.drain()
    assert stream.log.read_bytes() == b"0123"
    disk.now_s += 1.5
    stream.drain()
    assert stream.log.read_bytes() == b"0123456789"
    write(b"ab")
    assert stream.log.read_bytes() == b"0123456789ab" == stream.read(0, 100)
    assert stream.size == 12


def test_a_reader_brings_memory_to_the_disk_too(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"012345")
    disk.room, disk.now_s = 3, disk.now_s + 1.5
    assert stream.read(0, 100) == b"012345"
    assert stream.log.read_bytes() == b"012"
    assert stream.size == 6


def test_output_beyond_the_memory_is_dropped_and_counted(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"01234567")
    write(b"89abc")
    assert (stream.size, stream.dropped) == (10, 3)
    # From here on nothing fits until there is room for a note.
    write(b"defg")
    assert (stream.size, stream.dropped) == (10, 7)
    assert stream.read(0, 100) == b"0123456789"


def test_a_gap_is_marked_as_soon_as_there_is_room(
    stream: OutputStream, write: Write, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_KEPT_BYTES", 100)
    disk.room = 0
    write(100 * b"x" + b"abc")
    write(b"defg")
    assert stream.read(100, 5) == b""  # the keeper has all of the hundred bytes
    write(b"after")
    end = stream.read(100, 100)
    assert end.startswith(b"\n[7 ") and end.endswith(b"\nafter")
    assert stream.dropped == 7
    disk.room, disk.now_s = 1000, disk.now_s + 1.5
    write(b"!")
    # A hole in the file stands for what the keeper has.
    assert stream.log.read_bytes() == bytes(100) + end + b"!"
    write(b"later")
    assert stream.log.read_bytes().endswith(b"after!later")


def test_the_note_of_a_gap_leaves_the_count_of_dropped_bytes_right(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"0123456789abc")
    stream.read(10, 1)
    write(b"after")
    size = stream.size
    # The note is longer than the ten bytes of memory: nothing fits behind it.
    write(b"x" * 100)
    assert (stream.size, stream.dropped) == (size, 103)
    assert stream.read(10, 200).endswith(b"\nafter")


def test_only_what_the_keeper_has_makes_room(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 4
    write(b"0123456789abcd")
    stream.read(7, 1)
    write(b"efg")
    assert (stream.size, stream.dropped) == (17, 0)
    assert stream.read(7, 100) == b"789abcdefg"
    write(b"hi")
    assert (stream.size, stream.dropped) == (17, 2)


def test_what_the_keeper_has_stays_as_long_as_there_is_room(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"01234")
    stream.read(5, 1)
    write(b"56789")
    assert stream.read(0, 100) == b"0123456789"


def test_an_offset_behind_the_end_means_no_more_than_the_end(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"01234")
    stream.read(99, 1)
    write(b"56789")
    write(b"abc")
    # The bytes from 5 on were not asked for.
    assert stream.read(5, 100) == b"56789abc"


def test_the_tail_is_not_what_the_keeper_has(
    stream: OutputStream, write: Write, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_TAIL_BYTES", 4)
    disk.room = 0
    write(b"01234567\xff9")
    assert stream.tail() == "67�9"
    write(b"abc")
    assert stream.dropped == 3


def test_a_closed_stream_keeps_what_no_disk_took(
    stream: OutputStream, write: Write, disk: Disk, tmp_path: Path
) -> None:
    disk.room = 3
    write(b"012345")
    stream.close()
    stream.close()
    assert stream.pipe < 0 and not (tmp_path / "stdout.pipe").exists()
    assert stream.read(0, 100) == b"012345" and stream.size == 6
    disk.room, disk.now_s = 100, disk.now_s + 1.5
    assert stream.read(0, 100) == b"012345"
    assert stream.log.read_bytes() == b"012345"


def test_a_log_that_is_made_anew_is_for_its_owner_alone(
    stream: OutputStream, write: Write, disk: Disk
) -> None:
    disk.room = 0
    write(b"012345")
    stream.close()
    stream.log.unlink()
    disk.room, disk.now_s = 100, disk.now_s + 1.5
    assert stream.read(0, 100) == b"012345"
    assert stream.log.stat().st_mode & 0o777 == 0o600


def test_what_a_rank_wrote_by_itself_stays_in_the_log(stream: OutputStream, tmp_path: Path) -> None:
    stream.close()
    with stream.log.open("ab") as log:
        log.write(b"alone\n")
    stream.open()
    pipe = os.open(tmp_path / "stdout.pipe", os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, b"again\n")
    os.close(pipe)
    stream.drain()
    assert stream.log.read_bytes() == b"alone\nagain\n"


def test_a_pipe_is_emptied_before_it_is_closed(stream: OutputStream, tmp_path: Path) -> None:
    pipe = os.open(tmp_path / "stdout.pipe", os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, b"last words")
    (tmp_path / "stdout.pipe").unlink()
    stream.close()
    os.close(pipe)
    assert stream.log.read_bytes() == b"last words"


def test_the_next_attempt_continues_in_the_log(
    stream: OutputStream, write: Write, disk: Disk, tmp_path: Path
) -> None:
    write(b"first\n")
    disk.room = 0
    write(b"0123456789abc")
    disk.room, disk.now_s = 100, disk.now_s + 1.5
    assert stream.dropped == 3
    stream.open()
    assert stream.dropped == 0
    pipe = os.open(tmp_path / "stdout.pipe", os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, b"second\n")
    stream.drain()
    os.close(pipe)
    assert stream.log.read_bytes().startswith(b"first\n0123456789\n[3 ")
    assert stream.log.read_bytes().endswith(b"\nsecond\n")


def test_a_log_that_another_process_writes_is_read(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_bytes(b"abc")
    stream = OutputStream(tmp_path / "stderr.log", "stderr")
    assert stream.size == 3 and stream.dropped == 0
    log.write_bytes(b"abcdef")
    assert stream.size == 6 and stream.read(2, 3) == b"cde"
    assert not stream.removed
    log.unlink()
    assert stream.size == 0 and stream.read(0, 9) == b"" and not stream.removed


@pytest.mark.parametrize("replaced", [False, True])
def test_a_log_that_was_removed_is_still_read(
    stream: OutputStream, write: Write, replaced: bool
) -> None:
    write(b"before\n")
    assert not stream.removed
    stream.log.unlink()
    if replaced:
        stream.log.write_text("another's")
    assert stream.removed
    write(b"after\n")
    assert stream.size == 13
    stream.close()
    assert stream.removed and stream.read(0, 100) == b"before\nafter\n"


def test_a_log_that_is_removed_before_the_first_output_is_missed(stream: OutputStream) -> None:
    stream.log.unlink()
    assert stream.removed


def test_a_stream_without_a_folder_has_no_pipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = OutputStream(tmp_path / "missing" / "stdout.log", "stdout")
    pump = OutputPump()
    pump.add(stream)
    assert stream.pipe < 0 and stream.size == 0 and len(caplog.records) == 1
    pump.remove(stream)


def notes(order: OutputOrder) -> bytes:
    return order.read(0, 1000)


def test_a_change_of_streams_is_a_line(tmp_path: Path) -> None:
    order = OutputOrder(tmp_path / "order.log")
    assert order.size == 0 and notes(order) == b""
    order.note("stdout", 5)
    order.note("stdout", 9)
    assert order.size == 0
    order.note("stderr", 3)
    order.note("stdout", 12)
    assert notes(order) == b"stdout 9\nstderr 3\n"
    assert order.size == 18 and order.read(9, 6) == b"stderr"


def test_a_full_disk_loses_a_change_and_notes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    order = OutputOrder(tmp_path / "order.log")
    order.note("stdout", 5)
    with monkeypatch.context() as patch:
        patch.setattr(output.records, "open_to_append", refuse)
        order.note("stderr", 3)
    order.note("stdout", 9)
    order.note("stderr", 12)
    assert notes(order) == b"stdout 9\n"


def test_the_order_of_much_output_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_MOST_BYTES", 18)
    order = OutputOrder(tmp_path / "order.log")
    for end in range(1, 9):
        order.note(("stdout", "stderr")[end % 2], end)
    assert notes(order) == b"stderr 1\nstdout 2\n"


def test_the_order_of_a_stream_follows_its_output(disk: Disk, tmp_path: Path) -> None:
    order = OutputOrder(tmp_path / "order.log")
    first = OutputStream(tmp_path / "stdout.log", "stdout", order)
    other = OutputStream(tmp_path / "stderr.log", "stderr", order)
    disk.room = 4
    first._take(b"0123456789")
    other._take(b"x")
    first._take(b"a")
    assert notes(order) == b"stdout 10\nstderr 1\n"


def files(folder: Path, **contents: bytes) -> dict[str, OutputStream]:
    for name, content in contents.items():
        (folder / f"{name}.log").write_bytes(content)
    return {name: OutputStream(folder / f"{name}.log") for name in contents}


def test_small_streams_leave_their_share_to_the_others(tmp_path: Path) -> None:
    streams = files(tmp_path, a=b"a" * 100, b=b"bb", c=b"c" * 100, d=b"")
    chunks = read_chunks(streams, {}, 20)
    assert chunks == {
        "a": {"offset": 0, "data": 9 * "a"},
        "b": {"offset": 0, "data": "bb"},
        "c": {"offset": 0, "data": 9 * "c"},
    }


def test_a_stream_without_news_takes_no_share(tmp_path: Path) -> None:
    streams = files(tmp_path, a=b"a" * 100, b=b"b" * 100)
    assert read_chunks(streams, {"a": 100}, 20) == {"b": {"offset": 0, "data": 20 * "b"}}


def test_chunks_begin_at_the_offsets(tmp_path: Path) -> None:
    streams = files(tmp_path, a=b"abc\xff", b=b"xyz")
    chunks = read_chunks(streams, {"a": 2, "b": 3}, 100)
    assert chunks == {"a": {"offset": 2, "data": "c\xff"}}
    assert read_chunks(streams, {"a": 4, "b": 9}, 100) == {}
    assert read_chunks(streams, {"a": 3, "b": 3}, 1) == {"a": {"offset": 3, "data": "\xff"}}


@pytest.fixture
def pump() -> OutputPump:
    return OutputPump()


def has_words(stream: OutputStream) -> bool:
    return stream.size == len(b"words")


def test_a_thread_empties_all_pipes(tmp_path: Path, pump: OutputPump) -> None:
    before = threading.active_count()
    streams = [OutputStream(tmp_path / f"{name}.log") for name in ("stdout", "stderr")]
    for stream in streams:
        pump.add(stream)
    assert threading.active_count() == before + 1
    assert [thread for thread in threading.enumerate() if thread.name == "output"][-1].daemon
    for stream in streams:
        pipe = os.open(tmp_path / f"{stream.log.stem}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"words")
        until(partial(has_words, stream), 10)
        pump.remove(stream)
        assert stream.pipe < 0 and stream.log.read_bytes() == b"words"
        os.close(pipe)
        pump.remove(stream)


def test_an_error_of_one_stream_does_not_stop_the_others(
    tmp_path: Path, pump: OutputPump, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(output, "_AGAIN_S", 0.01)
    wrong, good = (OutputStream(tmp_path / f"{name}.log") for name in ("stdout", "stderr"))
    for stream in (wrong, good):
        pump.add(stream)
    monkeypatch.setattr(wrong, "drain", fail)
    for name in ("stdout", "stderr"):
        pipe = os.open(tmp_path / f"{name}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"words")
        os.close(pipe)
    until(partial(has_words, good), 10)
    monkeypatch.undo()
    until(partial(has_words, wrong), 10)
    pump.remove(wrong)
    pump.remove(good)
