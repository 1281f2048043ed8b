import random
from pathlib import Path

from workbench.rundir.events import format_event
from workbench.rundir.output.collect import Collector, LineSplitter
from workbench.rundir.paths import RunPaths


def test_pieces_of_any_size_give_the_same_lines() -> None:
    text = "".join(f"zeile {n} äöü\n" for n in range(200)).encode()
    rng = random.Random(0)
    splitter, lines, at = LineSplitter(), [], 0
    while at < len(text):
        size = rng.randint(1, 40)
        lines += list(splitter.feed(text[at : at + size]))
        at += size
    assert lines == text.decode().split("\n")[:-1]


def test_logs_are_exact_and_events_come_out(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0])
    raw = b"\xff\x00 bar 10%\r bar 20%\r\n" + format_event("step", rank=0, loss=1.5).encode() + b"\ntail"
    events, at = [], 0
    for size in (3, 11, 30, len(raw)):
        piece = raw[at : at + size]
        events += collector.take({"rank-0/stdout.log": {"offset": at, "data": piece.decode("latin-1")}})
        at += len(piece)
    assert paths.rank_log(0, "stdout").read_bytes() == raw
    assert [(e.kind, e.data["loss"]) for e in events] == [("step", 1.5)]


def test_a_late_answer_is_not_written_twice(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0])
    chunk = {"rank-0/stderr.log": {"offset": 0, "data": "once\n"}}
    collector.take(chunk)
    collector.take(chunk)
    assert paths.rank_log(0, "stderr").read_text() == "once\n"


def test_a_second_attempt_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    Collector(paths, [0]).take({"rank-0/stderr.log": {"offset": 0, "data": "once\n"}})
    again = Collector(paths, [0])
    assert again.offsets["rank-0/stderr.log"] == 5
    again.take({"rank-0/stderr.log": {"offset": 5, "data": "more\n"}})
    assert paths.rank_log(0, "stderr").read_text() == "once\nmore\n"


def test_a_full_disk_cuts_the_log_and_not_the_events(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.logs.mkdir()
    collector = Collector(paths, [0])
    log = paths.rank_log(0, "stdout")
    collector.take({"rank-0/stdout.log": {"offset": 0, "data": "kept\n"}})
    log.rename(tmp_path / "kept")
    log.symlink_to("/dev/full")
    line = format_event("step", rank=0) + "\n"
    for at in (5, 5 + len(line)):
        assert len(collector.take({"rank-0/stdout.log": {"offset": at, "data": line}})) == 1
    assert collector.cut == {"rank-0/stdout.log"}
    assert (tmp_path / "kept").read_text() == "kept\n"
