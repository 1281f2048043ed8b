"""The log of decisions: what is read back after a death, a full disk or damage."""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.runstores import decisions_in, empty
from workbench.base.redact import Redactor
from workbench.keeper.decisions import DecisionLog
from workbench.pods.pod import Pod
from workbench.rundir.register.store import DecisionKind, Registration, create_store, remove_store

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
    empty(log, path)
    for what, attempt in LIFE[:count]:
        log.add("a", what, attempt, **facts_of(what))
    return log


def replayed(path: Path) -> DecisionLog:
    log = DecisionLog(path)
    log.replay()
    return log


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


def test_the_next_keeper_finds_the_pods_as_they_were_last(tmp_path: Path) -> None:
    pods = [Pod(name="pod-0", root="/token/pod-0"), Pod(name="pod-1", address="127.0.0.3")]
    first = [pod.to_dict() for pod in pods]
    log = DecisionLog(tmp_path / "log", Redactor({"TOKEN": "token"}))
    log.set_pods(first)
    assert log.pods == (), "before the store is read, nothing is known of the cluster"
    create_store(tmp_path / "log", Registration(path="/c"))
    log.replay()
    log.set_pods(first)
    assert replayed(tmp_path / "log").pods == first
    replaced = [pods[0].to_dict(), Pod(name="pod-1", address="127.0.0.4").to_dict()]
    remove_store(tmp_path / "log")
    log.set_pods(replaced)
    assert replayed(tmp_path / "log").pods == replaced
    damaged = bytearray((tmp_path / "log").read_bytes())
    damaged[damaged.index(b"127.0.0.4") + 8] ^= 1
    (tmp_path / "log").write_bytes(damaged)
    assert replayed(tmp_path / "log").pods == replaced[:1]


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
    empty(log, tmp_path / "log")
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


def test_a_withdrawn_run_is_over(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1)
    log.add("a", DecisionKind.WITHDRAWN)
    run = replayed(tmp_path / "log").of("a")
    assert run is not None
    assert (run.over, run.outcome) == (True, {"state": "unknown"})


@pytest.mark.parametrize("count", range(len(LIFE) + 1))
def test_a_replay_has_the_state_that_the_writer_had(count: int, tmp_path: Path) -> None:
    log = written(tmp_path / "log", count)
    assert replayed(tmp_path / "log").runs == log.runs
    assert [each.what for each in decisions_in(tmp_path / "log")] == [
        what for what, _ in LIFE[:count]
    ]


@pytest.mark.parametrize("how", ["removed", "empty", "no store"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("taken_over", [False, True])
def test_a_store_that_another_program_spoils_is_written_again_whole(
    how: str, *, adds: bool, taken_over: bool, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    log = written(path, 5)
    if taken_over:
        log = replayed(path)
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else b"no store" * 1000)
        adds = True  # The next decision finds the damage.
    if adds:
        log.add("a", *LIFE[5])
    log.keep()
    assert replayed(path).runs == log.runs
    assert len(decisions_in(path)) == 5 + adds


def test_a_store_that_is_whole_is_not_written_again(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 3)
    before = (tmp_path / "log").stat()
    log.keep()
    assert (tmp_path / "log").stat() == before


def test_a_damaged_store_is_replaced_at_a_take_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 5)
    data = path.read_bytes()
    assert data.count(b"restarted") == 1
    path.write_bytes(data.replace(b"restarted", b"restarteb"))
    run = replayed(path).of("a")
    assert run is not None and run.path == Path("/runs/a")
    assert [each.what for each in decisions_in(path)] == [
        "submitted",
        "staged",
        "started",
        "staged",
    ]
    assert (tmp_path / "log.damaged").exists()


def test_decisions_that_cannot_be_written_are_written_later_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "log"
    log = written(path, 2)
    assert caplog.text == ""
    folder.rename(tmp_path / "away")
    for what, attempt in LIFE[2:]:
        log.add("a", what, attempt, **facts_of(what))
    log.keep()
    run = log.of("a")
    assert run is not None
    assert run.over, "the keeper itself knows"
    assert caplog.text.count("cannot write decisions") == 1, "once for all failures in a row"
    (tmp_path / "away").rename(folder)
    log.keep()
    log.keep()
    assert [each.what for each in decisions_in(path)] == [what for what, _ in LIFE]
    assert caplog.records[-1].levelno == logging.INFO


def test_secrets_are_masked_but_a_path_is_kept(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "log", Redactor({"API_TOKEN": "hunter2hunter2"}))
    empty(log, tmp_path / "log")
    log.add("a", DecisionKind.SUBMITTED, path="/runs/hunter2hunter2")
    log.add("a", DecisionKind.ENDED, 1, state="failed", message="bad token hunter2hunter2")
    content = (tmp_path / "log").read_bytes()
    assert content.count(b"hunter2hunter2") == 1
    assert b"/runs/hunter2hunter2" in content


class Faulty(sqlite3.Connection):
    """A connection whose n-th call fails, as on a disk in trouble."""

    calls = 0
    fails_at = 0

    def execute(self, *args: Any) -> sqlite3.Cursor:
        Faulty.calls += 1
        if Faulty.calls == Faulty.fails_at:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return super().execute(*args)


def test_a_fault_at_any_call_of_the_store_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = partial(sqlite3.connect, factory=Faulty)
    monkeypatch.setattr("workbench.rundir.register.store.sqlite3.connect", connect)
    for number in itertools.count(1):
        path = tmp_path / str(number)
        log = DecisionLog(path)
        empty(log, path)
        Faulty.calls = 0
        Faulty.fails_at = number
        for what, attempt in LIFE[:3]:
            log.add("a", what, attempt, **facts_of(what))
        came = Faulty.calls >= number
        log.keep()
        Faulty.fails_at = 0
        assert [each.what for each in decisions_in(path)] == [what for what, _ in LIFE[:3]], number
        assert replayed(path).runs == log.runs
        if not came:
            break
    assert number > 15
