"""Events that ranks printed and that a dead keeper did not write: found, timed and ordered."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.rundir import journal as journal_module
from workbench.rundir.events import MARK, STATE_EVENTS, Event, read_events
from workbench.rundir.journal import Journal
from workbench.rundir.output.missing import missing_events
from workbench.rundir.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path)
    made.logs.mkdir()
    made.events.touch()
    return made


def printed(paths: RunPaths, attempt: int, rank: int, *times_s: float) -> list[int]:
    """Write a log with an event for each time. Return the offsets of the events."""
    log = "text\n"
    offsets = []
    for number, time_s in enumerate(times_s):
        offsets.append(len(log))
        event = Event(time_s=time_s, rank=rank, kind="told", data={"n": number})
        log += MARK + event.to_json() + "\n"
    path = paths.rank_log(attempt, rank, "stdout")
    path.parent.mkdir(exist_ok=True)
    path.write_text(log)
    return offsets


def event(time_s: float, offset: int | None, rank: int | None = 0, attempt: int = 0) -> Event:
    return Event(time_s=time_s, rank=rank, kind="told", attempt=attempt, offset=offset)


def write(paths: RunPaths, *events: Event, end: str = "") -> None:
    paths.events.write_text("".join(each.to_json() + "\n" for each in events) + end)


def missing(paths: RunPaths) -> list[Event]:
    return missing_events(paths, list(read_events(paths.events)), STATE_EVENTS)


def test_missing_events_get_the_time_of_the_written_ones_clock(paths: RunPaths) -> None:
    # The clock of rank 0's pod is 100 s ahead.
    first, second, third = printed(paths, 0, 0, 101.0, 102.0, 105.0)
    (other,) = printed(paths, 0, 1, 3.0)
    write(paths, event(1.0, first))
    # Without a written event nothing is known of rank 1's clock.
    assert [(each.time_s, each.rank, each.offset) for each in missing(paths)] == [
        (2.0, 0, second),
        (3.0, 1, other),
        (5.0, 0, third),
    ]


def test_an_attempt_comes_after_the_attempt_before_and_other_files_are_left_out(
    paths: RunPaths,
) -> None:
    for attempt in (10, 2, 1):
        printed(paths, attempt, 12, 1.0, 0.5)
    (paths.logs / "attempt-1" / "rank-x.stdout.log").write_text(MARK + "{}\n")
    (paths.logs / "attempt-x").mkdir()
    found = [(each.attempt, each.printed_by, each.data["n"]) for each in missing(paths)]
    assert found == [(attempt, 12, number) for attempt in (1, 2, 10) for number in (0, 1)]


def test_a_log_that_is_shorter_than_the_events_or_cannot_be_read(paths: RunPaths) -> None:
    first, second = printed(paths, 0, 0, 1.0, 2.0)
    write(paths, event(1.0, first), event(2.0, second), event(3.0, 10_000))
    assert missing(paths) == [], "the disk took the events, and not the log"
    paths.rank_log(0, 1, "stdout").mkdir()
    paths.rank_log(0, 1, "stdout").rmdir()
    paths.rank_log(0, 1, "stdout").symlink_to("/dev/zero")
    assert missing(paths) == [], "a link is no log"


@pytest.mark.parametrize("block", [1, 4, 1 << 16])
@pytest.mark.parametrize("end", ["", '{"time_s": 2.0, "ra', '{"n": "' + "x" * 50])
def test_an_unfinished_last_line_is_removed_and_no_other(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, block: int, end: str
) -> None:
    monkeypatch.setattr(journal_module, "_BLOCK_BYTES", block)
    write(paths, event(1.0, 0), event(2.0, 1))
    whole = paths.events.read_bytes()
    write(paths, event(1.0, 0), event(2.0, 1), end=end)
    _, events = Journal(paths).recover()
    assert len(events) == 2
    assert paths.events.read_bytes() == whole
    for text, kept in ((end, ""), ("\n" + end, "\n")):
        paths.events.write_text(text)
        assert Journal(paths).recover()[1] == []
        assert paths.events.read_text() == kept


def test_a_restart_that_only_the_decisions_have_comes_before_the_events_of_its_attempt(
    paths: RunPaths,
) -> None:
    def restarted(loss: str, attempt: int | None = None) -> Event:
        data = {"what": loss}
        return Event(time_s=9.0, rank=None, kind="restarted", data=data, attempt=attempt)

    (first,) = printed(paths, 0, 0, 1.0)
    for attempt in (1, 2):
        printed(paths, attempt, 0, 1.0)
    write(paths, event(1.0, first), restarted("a", 1))
    # A restart that is written is not written again.
    _, events = Journal(paths).recover(restarts=[restarted("a"), restarted("b")])
    told = [(each.kind, each.attempt, each.data.get("what")) for each in events]
    assert told == [
        ("told", 0, None),
        ("restarted", 1, "a"),
        ("told", 1, None),
        ("restarted", 2, "b"),
        ("told", 2, None),
    ]
    written = paths.events.read_text()
    read = [each.to_json() for each in read_events(paths.events)]
    assert read == [each.to_json() for each in events]
    Journal(paths).recover(restarts=[restarted("a"), restarted("b")])
    assert paths.events.read_text() == written
