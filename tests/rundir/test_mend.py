"""Events that ranks printed and that a dead keeper did not write: found, timed and ordered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from workbench.rundir.events import MARK, STATE_EVENTS, Event
from workbench.rundir.output import mend
from workbench.rundir.output.mend import Mended, count_printed, events_before_restarts, mend_events
from workbench.rundir.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path)
    made.logs.mkdir()
    made.events.touch()
    return made


def printed(paths: RunPaths, rank: int, *times_s: float) -> None:
    lines = [
        MARK + Event(time_s=time_s, rank=rank, kind="told", data={"n": number}).to_json() + "\n"
        for number, time_s in enumerate(times_s)
    ]
    paths.rank_log(rank, "stdout").write_text("text\n" + "".join(lines))


def event(time_s: float, sequence: int, *, rank: int | None = 0, attempt: int = 0) -> Event:
    return Event(time_s=time_s, rank=rank, kind="told", data={}, attempt=attempt, sequence=sequence)


def write(paths: RunPaths, *events: Event, end: str = "") -> None:
    paths.events.write_text("".join(each.to_json() + "\n" for each in events) + end)


def mended(paths: RunPaths) -> Mended:
    return mend_events(paths, STATE_EVENTS)


def test_missing_events_get_the_time_of_the_written_ones_clock(paths: RunPaths) -> None:
    # The clock of rank 0's pod is 100 s ahead.
    printed(paths, 0, 101.0, 102.0, 105.0)
    printed(paths, 1, 3.0)
    write(paths, event(1.0, 0))
    found = mended(paths)
    assert found.whole and len(found.written) == 1
    # Without a written event nothing is known of rank 1's clock.
    assert [(each.time_s, each.rank, each.sequence) for each in found.missing] == [
        (2.0, 0, 1),
        (3.0, 1, 0),
        (5.0, 0, 2),
    ]


def test_a_log_that_cannot_be_read_is_said(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(paths, 0, 1.0)
    printed(paths, 1, 2.0)
    assert mended(paths).whole
    readable = mend.blocks_of

    def blocks_of(log: Path, root: Path) -> Iterator[bytes]:
        if log == paths.rank_log(0, "stdout"):
            raise OSError("too many open files")
        return readable(log, root)

    monkeypatch.setattr(mend, "blocks_of", blocks_of)
    found = mended(paths)
    assert not found.whole
    assert [each.rank for each in found.missing] == [1], "the other logs still count"
    assert count_printed(paths) == {"1": 1}


@pytest.mark.parametrize("block", [1, 4, 1 << 16])
@pytest.mark.parametrize("end", ["", '{"time_s": 2.0, "ra', '{"n": "' + "x" * 50])
def test_an_unfinished_last_line_is_removed_and_no_other(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    monkeypatch.setattr(mend, "_BLOCK_BYTES", block)
    write(paths, event(1.0, 0), event(2.0, 1))
    whole = paths.events.read_bytes()
    write(paths, event(1.0, 0), event(2.0, 1), end=end)
    assert len(mended(paths).written) == 2
    assert paths.events.read_bytes() == whole
    for text, kept in ((end, ""), ("\n" + end, "\n")):
        paths.events.write_text(text)
        assert mended(paths).written == []
        assert paths.events.read_text() == kept


def test_only_the_keepers_own_restarts_begin_an_attempt() -> None:
    def restarted(rank: int | None, **more: Any) -> Event:
        data = {"printed_before": {"0": 3}}
        return Event(time_s=1.0, rank=rank, kind="restarted", data=data, **more)

    note = Event(time_s=1.0, rank=None, kind="note", data={"printed_before": {"0": 9}})
    forged = restarted(None, printed_by=0)
    old = Event(time_s=1.0, rank=None, kind="restarted", data={})
    found = events_before_restarts([restarted(None), restarted(0), note, forged, old])
    assert found == [{"0": 3}, {}]


def test_events_are_of_the_attempt_that_began_before_their_line(paths: RunPaths) -> None:
    printed(paths, 0, *range(6))
    restart = Event(
        time_s=2.0,
        rank=None,
        kind="restarted",
        data={"printed_before": {"0": 2}},
        attempt=1,
        sequence=0,
    )
    write(paths, event(0.0, 0), restart)
    attempts = {each.sequence: each.attempt for each in mended(paths).missing}
    assert attempts == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}
    # An earlier keeper wrote no counts. The first event of an attempt then shows its begin.
    write(paths, event(0.0, 0), event(3.0, 3, attempt=1))
    attempts = {each.sequence: each.attempt for each in mended(paths).missing}
    assert attempts == {1: 0, 2: 0, 4: 1, 5: 1}


def test_event_lines_are_counted_by_rank_and_other_files_are_left_out(paths: RunPaths) -> None:
    printed(paths, 0, 1.0, 2.0)
    printed(paths, 12, 1.0)
    (paths.logs / "rank-x.stdout.log").write_text(MARK + "{}\n")
    assert count_printed(paths) == {"0": 2, "12": 1}
