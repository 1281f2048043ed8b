import errno
import os
import random
import resource
from pathlib import Path

import pytest

from tests.support.eventlines import format_event
from workbench.base.redact import Redactor
from workbench.rundir.events import Event
from workbench.rundir.output.collect import Collector, mask_file
from workbench.rundir.output.cutter import LineSplitter
from workbench.rundir.paths import RunPaths


def test_pieces_of_any_size_give_the_same_lines() -> None:
    text = "".join(f"zeile {n} äöü\n" for n in range(200)).encode()
    rng = random.Random(0)
    splitter, lines, at = LineSplitter(), [], 0
    while at < len(text):
        size = rng.randint(1, 40)
        lines += splitter.feed(text[at : at + size])
        at += size
    assert [line for _, line in lines] == text.decode().split("\n")[:-1]
    assert all(text[offset:].startswith(line.encode()) for offset, line in lines)


def test_logs_are_exact_and_events_come_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0])
    raw = (
        b"\xff\x00 bar 10%\r bar 20%\r\n"
        + format_event("step", rank=0, loss=1.5).encode()
        + b"\ntail"
    )
    events, at = [], 0
    for size in (3, 11, 30, len(raw)):
        piece = raw[at : at + size]
        events += collector.take(
            {"attempt-0/rank-0.stdout.log": {"offset": at, "data": piece.decode("latin-1")}}
        )
        at += len(piece)
    assert paths.rank_log(0, 0, "stdout").read_bytes() == raw
    assert [(e.kind, e.data["loss"]) for e in events] == [("step", 1.5)]


def test_a_late_answer_is_not_written_twice(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0])
    chunk = {"attempt-0/rank-0.stderr.log": {"offset": 0, "data": "once\n"}}
    collector.take(chunk)
    collector.take(chunk)
    assert paths.rank_log(0, 0, "stderr").read_text() == "once\n"


def test_a_second_attempt_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    Collector(paths, [0]).take({"attempt-0/rank-0.stderr.log": {"offset": 0, "data": "once\n"}})
    again = Collector(paths, [0])
    assert again.offsets["attempt-0/rank-0.stderr.log"] == 5
    again.take({"attempt-0/rank-0.stderr.log": {"offset": 5, "data": "more\n"}})
    assert paths.rank_log(0, 0, "stderr").read_text() == "once\nmore\n"


NAME = "attempt-0/rank-0.stdout.log"


class Pod:
    """The log of a rank on its pod: answers a poll by offset, as an agent does."""

    def __init__(self, collector: Collector) -> None:
        self.data, self.collector = b"", collector

    def poll(self, most: int = 1 << 20) -> list[Event]:
        at = self.collector.offsets[NAME]
        piece = self.data[at : at + most]
        return self.collector.take(
            {NAME: {"offset": at, "data": piece.decode("latin-1")}} if piece else {}
        )


def collecting(tmp_path: Path) -> tuple[Pod, Path, list[float]]:
    """Return a pod, the local log of its rank, and the clock of the collector between them."""
    paths, now = RunPaths(tmp_path), [100.0]
    paths.logs.mkdir()
    return Pod(Collector(paths, [0], clock=lambda: now[0])), paths.rank_log(0, 0, "stdout"), now


def test_a_full_disk_cuts_the_log_and_not_the_events_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, log, now = collecting(tmp_path)
    pod.data = b"kept\n"
    pod.poll()
    line = format_event("step", rank=0) + "\n"
    with monkeypatch.context() as full:
        full.setattr(pod.collector, "_open", lambda _path: os.open("/dev/full", os.O_WRONLY))
        for _ in range(3):
            pod.data += line.encode()
            assert len(pod.poll()) == 1
    assert pod.collector.cut == {NAME: "the disk is full"}
    assert log.read_text() == "kept\n"
    now[0] += 60
    pod.data += line.encode()
    events = [event for _ in range(20) for event in pod.poll(100)]
    assert len(events) == 1, "an event that was handed on is not handed on again"
    assert log.read_bytes() == pod.data
    assert pod.collector.cut == {}


def test_a_log_that_no_descriptor_is_left_for_names_that_cause_and_is_whole_later(
    tmp_path: Path,
) -> None:
    pod, log, now = collecting(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    pod.data = b"rank 0 line 0\n"
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        pod.poll()
        reasons = list(pod.collector.cut.values())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert reasons == ["the keeper has no free file descriptor (see ulimit -n)"]
    now[0] += 0.1
    pod.data += b"rank 0 line 1\n"
    pod.poll()
    assert log.read_bytes() == b"", "a file that failed a moment ago is not tried again at once"
    assert pod.collector.try_last(), "but before the end of the run"
    pod.poll()
    assert log.read_bytes() == pod.data
    assert not pod.collector.try_last()


def test_the_end_of_a_run_waits_some_seconds_for_a_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, log, now = collecting(tmp_path)
    pod.data = b"rank 0 line 0\n"

    def no_descriptor(_path: Path) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(pod.collector, "_open", no_descriptor)
        pod.poll()
        for _ in range(3):
            assert pod.collector.try_last()
            pod.poll()
            now[0] += 1.0
    assert pod.collector.try_last()
    pod.poll()
    assert log.read_bytes() == pod.data
    assert not pod.collector.try_last()
    pod.data += b"rank 0 line 1\n"
    monkeypatch.setattr(pod.collector, "_open", no_descriptor)
    pod.poll()
    now[0] += 10.0
    assert not pod.collector.try_last(), "a lasting shortage does not hold the run"


def test_a_log_that_cannot_be_opened_at_the_start_stays_on_the_pod_until_it_can(
    tmp_path: Path,
) -> None:
    paths, now = RunPaths(tmp_path), [100.0]
    paths.logs.mkdir()
    lines = [format_event("told", rank=0, n=number) + "\n" for number in range(3)]
    paths.rank_log(0, 0, "stdout").parent.mkdir()
    paths.rank_log(0, 0, "stdout").write_text(lines[0])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        pod = Pod(Collector(paths, [0], clock=lambda: now[0]))
        pod.data = "".join(lines).encode()
        assert pod.poll() == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert set(pod.collector.cut.values()) == {
        "the keeper has no free file descriptor (see ulimit -n)"
    }
    assert pod.poll() == [], "no descriptor was free a moment ago"
    now[0] += 60
    pod.poll()
    events = pod.poll()
    begins = [len(lines[0]), len(lines[0] + lines[1])]
    assert [(event.data["n"], event.offset) for event in events] == [(1, begins[0]), (2, begins[1])]
    assert paths.rank_log(0, 0, "stdout").read_bytes() == pod.data
    assert pod.collector.cut == {}


SECRETS = {
    "PGPASS": "opensesame-7",
    "PEM": "-----BEGIN PRIVATE "
    "KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nAQEFAASC\n-----END PRIVATE KEY-----",
}


@pytest.mark.parametrize("size", [1, 3, 17, 4096])
def test_secrets_are_masked_however_they_arrive_and_offsets_stay(tmp_path: Path, size: int) -> None:
    text = (
        "step 1\nlogin opensesame-7 of me\n\r 10% opensesame-7\r 20%\n"
        f"{SECRETS['PEM']}\nafter hf_abcdefghijklmnopqrst and Bearer abc123def456\n"
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA7\n-----END "
        "RSA PRIVATE KEY-----\nthe end, opensesame-7"
    )
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0], Redactor(SECRETS))
    data, name = text.encode(), "attempt-0/rank-0.stderr.log"
    for offset in range(0, len(data), size):
        piece = data[offset : offset + size].decode("latin-1")
        collector.take({name: {"offset": offset, "data": piece}})
    log = paths.rank_log(0, 0, "stderr").read_bytes().decode()
    assert len(log) == len(text)
    assert [line for line in log.splitlines() if "*" not in line and "END" not in line] == [
        "step 1",
        "",
        " 20%",
    ]
    for secret in ("opensesame", "MIIE", "hf_abc", "abc123"):
        assert secret not in log
    assert log.count("\n") == text.count("\n")
    assert collector.offsets[name] == len(data)


def test_a_secret_in_an_event_is_masked_and_the_event_stays_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    line = format_event("note", rank=0, text='say "opensesame-7"\n', step=3) + "\n"
    collector = Collector(paths, [0], Redactor(SECRETS))
    (event,) = collector.take({"attempt-0/rank-0.stdout.log": {"offset": 0, "data": line}})
    assert event.data["text"] == 'say "************"\n'
    assert event.data["step"] == 3


def test_a_launchers_log_is_masked_in_place(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_bytes(b"x" * ((1 << 20) - 5) + b"opensesame-7\nopensesame-7" + b"y" * 100)
    mask_file(log, Redactor(SECRETS), log.parent)
    assert log.read_bytes() == b"x" * ((1 << 20) - 5) + b"*" * 12 + b"\n" + b"*" * 12 + b"y" * 100
    mask_file(tmp_path / "none.log", Redactor(SECRETS), tmp_path)
