from __future__ import annotations

import json
from pathlib import Path

from workbench.rundir.events import EventTail
from workbench.rundir.output.tail import LogTail, read_logs
from workbench.rundir.paths import RunPaths
from workbench.rundir.totals import TotalsTail


def last_of_both(paths: RunPaths, most: int | None) -> list[str]:
    by_attempt, left_out = read_logs(paths, 0, ("stdout", "stderr"), most, 64 << 20)
    assert list(by_attempt) == [0] and left_out == 0
    return by_attempt[0]


def line(number: int, **data: object) -> str:
    return json.dumps({"time_s": number, "rank": 0, "kind": "step", **data}) + "\n"


def times(tail: EventTail) -> list[float]:
    return [event.time_s for event in tail.read()]


def test_events_are_read_once_and_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert times(tail) == []
    path.write_text(line(1) + 'broken\n[1]\n{"kind": 1}\n' + line(2) + line(3)[:5])
    assert times(tail) == [1, 2]
    assert times(tail) == []
    with path.open("a") as out:
        out.write(line(3)[5:] + line(4))
    assert times(tail) == [3, 4]


def test_events_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(line(n, x="ä" * 100) for n in range(15_000)))  # some 3 MiB
    assert times(EventTail(path)) == list(range(15_000))
    last = times(EventTail(path, last_bytes=1 << 15))
    assert 0 < len(last) < 200 and last == list(range(15_000))[-len(last) :]


def test_a_short_log_is_shown_whole_without_events(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stdout.log"
    path.write_bytes(
        b'one\n\n@workbench {"kind": "step"}\ntwo\r\n 10%|#   \r 20%|##  \n30%|\r 40%|###'
    )
    tail = LogTail(path)
    assert tail.refresh()
    assert tail.lines == ["one", "two", " 20%|##", " 40%|###"]
    assert not tail.refresh()


def test_a_log_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert not tail.refresh()
    path.write_bytes("half a lä".encode()[:-1])
    tail.refresh()
    with path.open("ab") as out:
        out.write("ä".encode()[1:] + b"ne\nnext\n")
    assert tail.refresh()
    assert tail.lines == ["half a läne", "next"]
    for line in ("third", "fourth"):  # what was read is not read again
        with path.open("a") as out:
            out.write(f"{line}\n")
        assert tail.refresh()
    assert tail.lines == ["half a läne", "next", "third", "fourth"]


def test_a_burst_is_skipped_to_its_end_and_memory_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n")
    tail = LogTail(path)
    tail.refresh()
    with path.open("a") as out:
        out.writelines(f"line {n}\n" for n in range(1_000_000))
    tail.refresh()
    assert tail.lines[-1] == "line 999999"
    assert len(tail.lines) == 400


def test_the_end_of_a_huge_log_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as out:
        out.truncate(10 << 30)  # a sparse file of 10 GiB
        out.seek(0, 2)
        out.write(b"\nthe end\n")
    tail = LogTail(path)
    tail.refresh()
    assert tail.lines[-1] == "the end"


def test_events_do_not_crowd_out_what_a_rank_printed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    event = '\n@workbench {"time_s": 1.0, "rank": 0, "kind": "step", "step": 1}\n'
    path.write_text(
        "".join(f"said {n}\n" for n in range(30)) + event * 6000
    )  # some 400 KiB of events
    tail = LogTail(path)
    tail.refresh()
    assert tail.lines[-1] == "said 29"


def test_an_unfinished_line_behind_many_events_is_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("said\n" + '@workbench {"kind": "step"}\n' * 9000 + "half")  # two windows
    tail = LogTail(path)
    tail.refresh()
    assert tail.lines == ["said", "half"]


def test_a_single_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("1")
    tail = LogTail(path)
    assert tail.refresh()
    assert tail.lines == ["1"]


def test_the_last_lines_of_a_long_log_are_whole_and_as_many_as_there_are(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.rank_log(0, 0, "stdout").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stdout").write_text("".join(f"{n} {'x' * 90}\n" for n in range(2000)))
    paths.rank_log(0, 0, "stderr").write_text("A\n")
    # A window on the end of the file holds some 690 lines, of which the first is cut.
    for most in [*range(650, 720), 1500]:
        last = last_of_both(paths, most)
        assert [line.split(" ") for line in last[:-1]] == [
            [str(n), "x" * 90] for n in range(2001 - most, 2000)
        ]
        assert last[-1] == "A"
    assert len(last_of_both(paths, 5000)) == 2001
    assert len(last_of_both(paths, None)) == 2001
    with paths.rank_log(0, 0, "stderr").open("r+b") as out:
        out.truncate(10 << 30)  # a sparse file of 10 GiB
        out.seek(0, 2)
        out.write(b"\nthe end\n")
    assert last_of_both(paths, 1) == ["the end"]


def test_both_streams_stand_in_the_order_of_their_turns_whole_lines_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.rank_log(0, 0, "stdout").parent.mkdir(parents=True)
    paths.rank_log(0, 0, "stdout").write_text(
        "a\nb\n@workbench {}\n\nc begins, ends later\nunfinished"
    )
    paths.rank_log(0, 0, "stderr").write_text("A\nB\nC\n")
    assert last_of_both(paths, None) == [
        "a",
        "b",
        "c begins, ends later",
        "unfinished",
        "A",
        "B",
        "C",
    ], "older runs"
    turns = [
        "stdout 2",
        "stderr 2",
        "stdout 25",
        "stderr 4",
        "junk",
        "stdout -1",
        "stderr 99999999999999999999999",
        "",
    ]
    paths.rank_log(0, 0, "order").write_text("\n".join(turns))
    merged = ["a", "A", "b", "B", "c begins, ends later", "unfinished", "C"]
    assert last_of_both(paths, None) == merged
    assert last_of_both(paths, 3) == merged[-3:]
    (tmp_path / "elsewhere").write_text("stderr 99")
    paths.rank_log(0, 0, "order").unlink()
    paths.rank_log(0, 0, "order").symlink_to(tmp_path / "elsewhere")
    assert last_of_both(paths, 1) == ["C"]


def test_totals_read_what_is_new_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    path.write_text(line(1, kind="start", world_size=2) + line(2, step=1))
    tail = TotalsTail(path)
    assert tail.read().reached_step == 1
    # A second reading of the first events would not find them.
    with path.open("r+b") as file:
        file.write(b" " * path.stat().st_size)
        file.write(line(3, step=2).encode())
    totals = tail.read()
    assert totals.reached_step == 2 and totals.start == {"world_size": 2}
