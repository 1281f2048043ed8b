"""The log of decisions: what is read back after a death, a full disk or damage."""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.smalldisk import small_disk
from workbench.base.files import gate
from workbench.base.redact import Redactor
from workbench.keeper import decisions
from workbench.keeper.decisions import DecisionKind, DecisionLog, read_decisions

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
LIFE: Sequence[tuple[DecisionKind, int]] = [
    (DecisionKind.SUBMITTED, 0),
    (DecisionKind.STAGED, 1),
    (DecisionKind.STARTED, 1),
    (DecisionKind.RESTARTED, 2),
    (DecisionKind.STAGED, 2),
    (DecisionKind.STARTED, 2),
    (DecisionKind.BROUGHT, 2),
    (DecisionKind.ENDED, 2),
    (DecisionKind.CLEARED, 2),
]


def facts_of(what: DecisionKind) -> dict[str, object]:
    match what:
        case DecisionKind.SUBMITTED:
            return {"path": "/runs/a", "pods": ["pod-0", "pod-1"]}
        case DecisionKind.RESTARTED:
            return {"restart": 1, "loss": {"what": "pod-1 was lost"}}
        case DecisionKind.STAGED:
            return {"pods": ["pod-0", "pod-1"], "restart": 0}
        case DecisionKind.ENDED:
            return {"state": "succeeded", "message": "all ranks finished"}
    return {}


def written(path: Path, count: int = len(LIFE)) -> DecisionLog:
    log = DecisionLog(path)
    log.clear()
    for what, attempt in LIFE[:count]:
        log.add("a", what, attempt, **facts_of(what))
    return log


def replayed(path: Path) -> DecisionLog:
    log = DecisionLog(path)
    log.replay()
    return log


@pytest.mark.parametrize("count", range(len(LIFE) + 1))
def test_a_replay_has_the_state_that_the_writer_had(count: int, tmp_path: Path) -> None:
    log = written(tmp_path / "log", count)
    assert replayed(tmp_path / "log").runs == log.runs
    assert [each.n for each in read_decisions(tmp_path / "log")] == list(range(1, count + 1))


def test_a_run_s_state_names_its_attempt_its_pods_and_a_restart_that_was_begun(
    tmp_path: Path,
) -> None:
    run = written(tmp_path / "log", 4).of("a")
    assert run is not None
    assert (run.path, run.attempt, run.restart) == (Path("/runs/a"), 2, 1)
    assert (list(run.pods), run.started, run.over) == (["pod-0", "pod-1"], False, False)
    assert run.loss is not None
    run = written(tmp_path / "log", 6).of("a")
    assert run is not None
    assert (run.loss, run.started, run.over) == (None, True, False)


@pytest.mark.parametrize(
    "late",
    [DecisionKind.STAGED, DecisionKind.STARTED, DecisionKind.RESTARTED, DecisionKind.SUBMITTED],
)
def test_a_run_that_is_over_stays_over(late: DecisionKind, tmp_path: Path) -> None:
    log = written(tmp_path / "log")
    log.add("a", late, 3, **facts_of(late))
    run = replayed(tmp_path / "log").of("a")
    assert run is not None
    assert (run.over, run.outcome["state"], run.attempt) == (True, "succeeded", 2)


def test_a_torn_last_line_is_dropped_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 3)
    with path.open("ab") as out:
        out.write(b'{"n": 4, "run": "a", "wh')
    log = replayed(path)
    log.add("a", DecisionKind.ENDED, 1, state="failed", message="no")
    assert [each.n for each in read_decisions(path)] == [1, 2, 3, 4]
    assert read_decisions(path)[-1].what is DecisionKind.ENDED


@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_a_removed_log_is_written_again_whole(
    *, taken_over: bool, adds: bool, tmp_path: Path
) -> None:
    path = tmp_path / "folder" / "log"
    path.parent.mkdir()
    log = written(path, 5)
    if taken_over:
        log = replayed(path)
    path.unlink()
    path.parent.rmdir()
    log.keep()  # The folder is not restored yet.
    count = 5
    if adds:
        log.add("a", *LIFE[5])
        count = 6
    path.parent.mkdir()
    log.keep()
    assert replayed(path).runs == log.runs
    assert [each.n for each in read_decisions(path)] == list(range(1, count + 1))
    size = path.stat().st_size
    log.keep()
    assert path.stat().st_size == size


def test_a_log_that_was_removed_before_the_next_decision_is_whole(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 3)
    (tmp_path / "log").unlink()
    log.add("a", *LIFE[3], **facts_of(DecisionKind.RESTARTED))
    assert [each.n for each in read_decisions(tmp_path / "log")] == [1, 2, 3, 4]


def test_a_cleared_log_is_not_written_again(tmp_path: Path) -> None:
    log = written(tmp_path / "log")
    log.clear()
    log.keep()
    assert not (tmp_path / "log").exists()


@given(cut=st.integers(0, 2000), damage=st.binary(max_size=30))
def test_no_damage_keeps_the_log_from_being_read(cut: int, damage: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        written(path)
        data = path.read_bytes()
        at = cut % len(data)
        path.write_bytes(data[:at] + damage + data[at:])
        log = replayed(path)
        numbers = [each.n for each in read_decisions(path)]
        assert numbers == sorted(set(numbers))
        log.add("b", DecisionKind.SUBMITTED, path="/runs/b")
        assert replayed(path).of("b") is not None


def test_lines_that_cannot_be_written_are_written_later_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = written(path, 2)
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()
    for what, attempt in LIFE[2:]:
        log.add("a", what, attempt, **facts_of(what))
    run = log.of("a")
    assert run is not None
    assert run.over, "the keeper itself knows"
    path.rmdir()
    path.write_bytes(whole)
    log.keep()
    assert [each.n for each in read_decisions(path)] == list(range(1, len(LIFE) + 1))
    log.keep()
    assert len(read_decisions(path)) == len(LIFE), "once"


@pytest.mark.slow
@as_root
def test_a_full_disk_takes_decisions_from_the_reserve_and_then_late(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        log = DecisionLog(disk / "log")
        log.clear()
        log.reserve()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as out, pytest.raises(OSError, match="No space"):
            while True:
                out.write(bytes(4096))
        log.add("a", DecisionKind.SUBMITTED, path="/runs/a")
        assert len(read_decisions(disk / "log")) == 1, "the reserve was freed"
        note = "x" * 4000
        for _ in range(40):
            log.add("a", DecisionKind.STAGED, 1, note=note)
        assert len(read_decisions(disk / "log")) < 41
        filler.unlink()
        log.keep()
        assert [each.n for each in read_decisions(disk / "log")] == list(range(1, 42))


def test_a_damaged_line_repeated_lines_and_strange_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    good = {"n": 1, "time_s": 1.0, "run": "a", "what": "submitted", "path": "/runs/a"}
    lines: list[object] = [
        good,
        {**good, "n": 1, "what": "ended"},
        {**good, "n": 2, "what": "exploded"},
        {**good, "n": "3"},
        {**good, "n": 4, "run": ""},
        ["n", 5],
        {**good, "n": 6, "what": "staged", "attempt": -1, "pods": {"no": "list"}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n\xff\n")
    assert [(each.n, each.what) for each in read_decisions(path)] == [
        (1, "submitted"),
        (6, "staged"),
    ]
    assert not replayed(path).runs["a"].over


def test_secrets_are_masked_but_a_path_is_kept(tmp_path: Path) -> None:
    redact = Redactor({"API_TOKEN": "hunter2hunter2"})
    log = DecisionLog(tmp_path / "log", redact)
    log.clear()
    log.add("a", DecisionKind.SUBMITTED, path="/runs/hunter2hunter2")
    log.add("a", DecisionKind.ENDED, 1, state="failed", message="bad token hunter2hunter2")
    content = (tmp_path / "log").read_text()
    assert content.count("hunter2hunter2") == 1
    assert "/runs/hunter2hunter2" in content


class Disk:
    """A disk that takes no line while it is full, and frees room when a reserve is removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *reserves: Path) -> None:
        self.full = False
        self.reserves = reserves
        self.synced: list[Path] = []
        whole = gate.write_all
        sync = decisions._sync_folder

        def write_all(out: BinaryIO, data: bytes) -> None:
            if self.full or any(path.exists() for path in self.reserves):
                whole(out, data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            whole(out, data)

        def sync_folder(folder: Path) -> None:
            self.synced.append(folder)
            sync(folder)

        monkeypatch.setattr(decisions, "write_all", write_all)
        monkeypatch.setattr(decisions, "_sync_folder", sync_folder)


def numbers(path: Path) -> list[int]:
    return [each.n for each in read_decisions(path)]


def test_the_first_line_of_a_log_syncs_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    log = written(tmp_path / "log", 3)
    assert disk.synced == [tmp_path]
    log.clear()
    log.add("b", DecisionKind.SUBMITTED, path="/runs/b")
    assert disk.synced == [tmp_path, tmp_path]
    assert (numbers(tmp_path / "log"), list(log.runs)) == ([1], ["b"])


def test_a_line_that_a_full_disk_took_in_part_is_written_whole_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    disk = Disk(monkeypatch)
    log = written(tmp_path / "log", 1)
    assert caplog.text == ""
    disk.full = True
    log.add("a", *LIFE[1])
    log.keep()
    assert numbers(tmp_path / "log") == [1], "no half line"
    log.add("a", *LIFE[2])
    disk.full = False
    log.keep()
    assert numbers(tmp_path / "log") == [1, 2, 3]
    assert (tmp_path / "log").read_bytes().count(b"\n") == 3
    levels = [each.levelno for each in caplog.records]
    assert levels == [logging.WARNING, logging.INFO], "once for all failures in a row"
    disk.full = True
    log.add("a", *LIFE[3])
    assert caplog.records[-1].levelno == logging.WARNING


class Torn:
    """An open log of which a half line cannot be removed again."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def __enter__(self) -> Torn:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._out.close()

    def __getattr__(self, name: str) -> object:
        return getattr(self._out, name)

    def truncate(self, _size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_half_line_that_stays_is_removed_before_the_next_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    disk = Disk(monkeypatch)
    log = written(path, 1)
    whole = gate.open_to_append
    with monkeypatch.context() as torn:
        torn.setattr(decisions, "open_to_append", lambda *args: Torn(whole(*args)))
        disk.full = True
        log.add("a", *LIFE[1])
    assert not path.read_bytes().endswith(b"\n")
    disk.full = False
    log.keep()
    assert numbers(path) == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_room_is_kept_on_the_disk_and_freed_for_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    own = tmp_path / ".log.reserve"
    other.write_bytes(bytes(10))
    log = DecisionLog(path, reserves=[other])
    log.clear()
    log.reserve()
    assert own.stat().st_size > 4096, "room for some hundred lines"
    Disk(monkeypatch, own, other)
    log.add("a", DecisionKind.SUBMITTED, path="/runs/a")
    assert (numbers(path), own.exists(), other.exists()) == ([1], False, False)


def test_room_is_given_back_at_the_end(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    log.reserve()
    log.release()
    log.release()
    assert list(tmp_path.iterdir()) == []


def test_a_reserve_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    DecisionLog(tmp_path / "gone" / "log").reserve()
    assert len(caplog.records) == 1


def test_a_removed_log_gets_its_reserve_back(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 3)
    (tmp_path / "log").unlink()
    log.keep()
    assert numbers(tmp_path / "log") == [1, 2, 3]
    assert (tmp_path / ".log.reserve").exists()


def test_a_log_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 3)
    before = (tmp_path / "log").read_bytes()
    log.keep()
    assert (tmp_path / "log").read_bytes() == before
    assert not (tmp_path / ".log.reserve").exists()


def test_a_line_of_an_earlier_keeper_without_an_attempt_or_a_time_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"n": 3, "run": "a", "what": "submitted", "time_s": "late"}\n')
    (line,) = read_decisions(path)
    assert (line.n, line.attempt, line.time_s, line.facts) == (3, 0, 0.0, {})
    log = replayed(path)
    log.add("a", DecisionKind.STAGED, 1, pods=["pod-0"])
    assert numbers(path) == [3, 4]
    run = log.of("a")
    assert run is not None
    assert (run.restart, run.attempt, list(run.pods)) == (0, 1, ["pod-0"])


def test_a_time_is_written_to_the_millisecond(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 1)
    assert json.loads(path.read_text())["time_s"] == pytest.approx(
        round(read_decisions(path)[0].time_s, 3), abs=0
    )
    line = decisions.Decision(n=1, time_s=2.00049, run="a", what=DecisionKind.STARTED).to_line()
    assert json.loads(line)["time_s"] == 2.0


def test_pods_of_a_run_are_those_of_its_last_attempt(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1)
    log.add("a", DecisionKind.STAGED, 1, restart=0)
    run = log.of("a")
    assert run is not None
    assert list(run.pods) == ["pod-0", "pod-1"], "a line may name none"
    log.add("a", DecisionKind.STAGED, 2, pods=["pod-1"], restart=1, event={"time_s": 1.0})
    assert (list(run.pods), run.restart, run.loss) == (["pod-1"], 1, None)
    assert run.events == [{"time_s": 1.0}]


def test_each_decision_changes_what_is_known_of_a_run(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log")
    log.clear()
    known = []
    for what, attempt in LIFE:
        log.add("a", what, attempt, **facts_of(what))
        run = log.of("a")
        assert run is not None
        known.append((run.last, run.attempt, run.started, run.restart, run.brought, run.over))
    assert known == [
        (DecisionKind.SUBMITTED, 0, False, 0, False, False),
        (DecisionKind.STAGED, 1, False, 0, False, False),
        (DecisionKind.STARTED, 1, True, 0, False, False),
        (DecisionKind.RESTARTED, 2, False, 1, False, False),
        (DecisionKind.STAGED, 2, False, 1, False, False),
        (DecisionKind.STARTED, 2, True, 1, False, False),
        (DecisionKind.BROUGHT, 2, True, 1, True, False),
        (DecisionKind.ENDED, 2, True, 1, True, True),
        (DecisionKind.CLEARED, 2, True, 1, True, True),
    ]
    log.add("a", DecisionKind.ENDED, 2, state="failed")
    run = log.of("a")
    assert run is not None
    assert (run.last, run.outcome["state"]) == (DecisionKind.CLEARED, "succeeded")
    assert log.of("b") is None


def test_pods_that_are_prepared_again_have_no_ranks_yet(tmp_path: Path) -> None:
    """A keeper took over ranks that had not started."""
    log = written(tmp_path / "log", 3)
    run = log.of("a")
    assert run is not None and run.started
    log.add("a", DecisionKind.STAGED, 1)
    assert (run.started, run.restart) == (False, 0)
    log.add("a", DecisionKind.RESTARTED, 2)
    assert (run.restart, run.attempt) == (0, 2), "a line without the number"


def test_the_first_line_of_a_log_that_was_missing_has_the_first_number(tmp_path: Path) -> None:
    log = replayed(tmp_path / "log")
    log.add("a", DecisionKind.SUBMITTED, path="/runs/a")
    assert numbers(tmp_path / "log") == [1]


def test_a_withdrawn_run_is_over(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1)
    log.add("a", DecisionKind.WITHDRAWN)
    run = replayed(tmp_path / "log").of("a")
    assert run is not None
    assert (run.over, run.outcome) == (True, {"state": "unknown"})


def test_a_missing_log_has_no_decisions_and_an_unreadable_one_raises(tmp_path: Path) -> None:
    assert read_decisions(tmp_path / "log") == []
    (tmp_path / "log").mkdir()
    with pytest.raises(OSError):
        replayed(tmp_path / "log")
