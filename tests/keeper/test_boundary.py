"""An error of one run reaches neither the keeper's loop nor another run: no process."""

from __future__ import annotations

import ast
import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench.keeper
from tests.fakes.runloop import RUN, Fate, KeeperDied, Plan, SimFleet, Simulation
from tests.support.scripts import script_job
from workbench.base.errors import RunError
from workbench.base.files import read_json
from workbench.base.files.private import make_cluster_folder
from workbench.base.redact import Redactor
from workbench.keeper import boundary, resource_limits
from workbench.keeper.boundary import isolate_pod_errors, isolate_run_errors
from workbench.keeper.keeper import Keeper
from workbench.keeper.recovery import inherited_runs
from workbench.keeper.requests import OfRun, Submit
from workbench.keeper.run.runner import Runner
from workbench.keeper.run_queue import IdleTime, RunQueue
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import (
    own_runs,
)
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import (
    ClusterStatus,
)

KEEPER = Path(workbench.keeper.__file__).parent
PLACES = {
    "keeper.py:_keep_states",
    "keeper.py:_take_over",
    "keeper.py:close",
    "keeper.py:_bring_held",
    "run_queue.py:_begin_next",
    "run_queue.py:_run",
    "run_queue.py:end_waiting",
    "run_queue.py:withdraw",
    "runner.py:run",
    "runner.py:_end",
    "runner.py:_clear",
    "recovery.py:inherited_runs",
}


def test_the_places_that_touch_a_run_s_folder_go_through_the_guard() -> None:
    """A new place is entered here, and in the table of docs/inside.md."""
    found = set()
    for path in KEEPER.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            if any(
                isinstance(c.func, ast.Name) and c.func.id == "isolate_run_errors" for c in calls
            ):
                found.add(f"{path.name}:{function.name}")
        by_hand = path.read_text().count("# Run boundary")
        assert by_hand == (2 if path.name == "boundary.py" else 0), path
    assert found == PLACES


def test_a_guard_ends_the_run_and_survives_the_end_too(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[Exception] = []

    def end(error: Exception) -> None:
        ended.append(error)
        raise OSError("the disk takes nothing")

    boundary._last.clear()
    with isolate_run_errors("a", "moving the run", end=end):
        raise ValueError("no")
    assert [str(error) for error in ended] == ["no"]
    assert caplog.text.count("moving the run") == 1
    with pytest.raises(KeyboardInterrupt), isolate_run_errors("a", "moving the run", end=end):
        raise KeyboardInterrupt
    assert len(ended) == 1


def test_a_guard_logs_an_error_once_until_the_action_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    boundary._last.clear()
    for fails in (True, True, False, True):
        with isolate_run_errors("a", "keeping the state"):
            if fails:
                raise OSError("stale")
    assert caplog.text.count("keeping the state") == 2


class StubRun:
    """A run that notes what is asked of it, and fails at some of it."""

    def __init__(self, name: str, *fails_at: str) -> None:
        self.context: Any = SimpleNamespace(
            run_id=name, links=["one"], inherited=False, may_have_ranks=False
        )
        self.wanted = 1
        self.asked: list[str] = []
        self.over = False
        self._fails_at = fails_at

    def _do(self, name: str) -> None:
        self.asked.append(name)
        if name in self._fails_at:
            raise OSError(f"stale at {name}")

    def enqueue(self) -> None:
        self._do("enqueue")

    def move(self, links: Sequence[str]) -> None:
        self._do("move")

    def run(self) -> None:
        self._do("run")

    def keep_state(self) -> None:
        self._do("keep_state")

    def cancel(self) -> None:
        self._do("cancel")

    def abandon(self, why: str) -> None:
        self._do("abandon")

    def fail(self, error: Exception) -> None:
        self.over = True
        self._do("fail")

    @property
    def holds(self) -> bool:
        self._do("holds")
        return False


class StubFleet:
    def free(self, count: int, busy: Sequence[object]) -> list[str] | None:
        return None if busy else ["two"]


def queue_of(*runs: StubRun) -> tuple[RunQueue, threading.Event]:
    closing = threading.Event()
    fleet: Any = StubFleet()
    queue = RunQueue(fleet, IdleTime(0.0, lambda: None), closing)
    for run in runs:
        queue.add(run)  # type: ignore[arg-type]
    return queue, closing


@pytest.mark.parametrize("fails_at", [("move",), ("move", "fail"), ("run",)])
def test_a_queue_outlives_a_run_that_fails_at_its_start(fails_at: Sequence[str]) -> None:
    bad, good = StubRun("bad", *fails_at), StubRun("good")
    queue, closing = queue_of(bad, good)
    queue.run_in_order(closing.set, "the cluster was closed before it started")
    assert fails_at[0] in bad.asked
    assert good.asked == ["enqueue", "move", "run"]
    assert ("fail" in bad.asked) is (fails_at[0] == "move")


def test_a_queue_that_closes_ends_each_waiting_run() -> None:
    bad, good = StubRun("bad", "abandon"), StubRun("good")
    queue, closing = queue_of(bad, good)
    closing.set()
    queue.run_in_order(closing.set, "the cluster was closed before it started")
    assert bad.asked == good.asked == ["enqueue", "abandon"]
    assert queue.withdraw(bad) is False, "no run waits any more"  # type: ignore[arg-type]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterPaths:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    root = tmp_path / "c"
    root.mkdir(mode=0o700)
    make_cluster_folder(root)
    return ClusterPaths(root)


class SimKeeper(Keeper):
    """A keeper whose pods are simulated."""

    def __init__(self, paths: ClusterPaths, sim: Simulation) -> None:
        super().__init__(paths, ClusterSpec(count=2), Redactor())
        self._phase = "ready"
        self.sim = sim

    def take_over(self) -> None:
        self._log.replay()
        fleet: Any = SimFleet(self.sim)
        self._runners, self._failed_runs = inherited_runs(
            fleet, Redactor(), ClusterStatus(), self._log, self.sim.around
        )

    def _runner_for(self, request: Submit) -> Runner:
        return Runner(replace(self.sim.context(), log=self._log), self.sim.around)


@pytest.fixture
def sim(paths: ClusterPaths) -> Simulation:
    return Simulation(paths.root, script_job(path="/home/me/train.py"), [Plan()])


def request_of(sim: Simulation) -> Submit:
    return Submit(op="submit", run=RUN, path=sim.paths.root, job=dict(sim.job.to_dict()))


def test_a_submission_is_idempotent_also_for_the_next_keeper(
    paths: ClusterPaths, sim: Simulation
) -> None:
    first = SimKeeper(paths, sim)
    assert first._do(request_of(sim)) == {}
    runner = first._runners[RUN]
    assert first._do(request_of(sim)) == {}
    assert (first._runners[RUN], len(first._queue._waiting)) == (runner, 1)
    second = SimKeeper(paths, sim)
    second.take_over()
    assert second._do(request_of(sim)) == {}, "it is queued"
    assert second._runners[RUN].run() == "succeeded"
    third = SimKeeper(paths, sim)
    third.take_over()
    sim.paths.result.unlink()
    for keeper in (second, third):
        with pytest.raises(RunError, match=f"run {RUN} has ended: all ranks finished"):
            keeper._do(request_of(sim))
    assert sim.trained == [1]


def test_the_next_keeper_knows_a_run_whose_keeper_died_while_it_was_queued(
    paths: ClusterPaths, sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_queue: RunQueue, runner: Runner) -> None:
        runner.enqueue()
        raise SystemExit

    monkeypatch.setattr(RunQueue, "add", die)
    with pytest.raises(SystemExit):
        SimKeeper(paths, sim)._do(request_of(sim))
    assert [each.id for each in own_runs(paths.root)] == [RUN]
    second = SimKeeper(paths, sim)
    second.take_over()
    assert second._runners[RUN].run() == "succeeded"


def test_a_run_that_the_queue_refuses_is_withdrawn(
    paths: ClusterPaths, sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_queue: RunQueue, _runner: Runner) -> None:
        raise RunError("there is no room for its result")

    monkeypatch.setattr(RunQueue, "add", refuse)
    first = SimKeeper(paths, sim)
    with pytest.raises(RunError, match="no room for its result"):
        first._do(request_of(sim))
    assert first._runners == {}
    second = SimKeeper(paths, sim)
    second.take_over()
    assert second._runners == {}
    for keeper in (first, second):
        with pytest.raises(RunError, match="no room for its result"):
            keeper._do(request_of(sim))


@pytest.mark.parametrize("patience_s", [5.0, 0.0], ids=["for a moment", "for long"])
def test_a_submission_waits_for_a_descriptor(
    paths: ClusterPaths, sim: Simulation, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    monkeypatch.setattr(resource_limits, "PATIENCE_S", patience_s)
    monkeypatch.setattr(resource_limits, "_PAUSE_S", 0.01)
    runner_for = SimKeeper._runner_for
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EMFILE, "…")]

    def short(keeper: SimKeeper, request: Submit) -> Runner:
        if failures:
            raise failures.pop()
        return runner_for(keeper, request)

    monkeypatch.setattr(SimKeeper, "_runner_for", short)
    keeper = SimKeeper(paths, sim)
    if patience_s:
        assert keeper._do(request_of(sim)) == {}
        assert list(keeper._runners) == [RUN]
    else:
        with pytest.raises(RunError, match=r"no free file descriptor .* submit the job again"):
            keeper._do(request_of(sim))
        assert not keeper._runners


def test_a_withdrawn_run_is_refused_later(paths: ClusterPaths, sim: Simulation) -> None:
    first = SimKeeper(paths, sim)
    first._do(request_of(sim))
    assert first._queue.withdraw(first._runners[RUN])
    sim.paths.result.unlink()
    second = SimKeeper(paths, sim)
    second.take_over()
    for keeper in (first, second):
        with pytest.raises(RunError, match="cancelled before its start"):
            keeper._do(request_of(sim))


@pytest.mark.parametrize("place", ["before prepare", "after start"])
def test_a_run_that_is_cancelled_before_its_turn_under_the_next_keeper_leaves_no_rank(
    place: str, paths: ClusterPaths, sim: Simulation
) -> None:
    sim.plans = [Plan(others=Fate())]
    first = SimKeeper(paths, sim)
    first._do(request_of(sim))
    sim.dies_at = {place: 1}
    with pytest.raises(KeeperDied):
        first._runners[RUN].run()
    second = SimKeeper(paths, sim)
    second.take_over()
    runner = second._runners[RUN]
    second._queue.add(runner)
    second._do(OfRun(op="cancel", run=RUN))
    has_ranks = place == "after start"
    assert runner.over is not has_ranks, "a run without ranks is cancelled at once"
    state = runner.run() if has_ranks else read_json(sim.paths.result)["state"]
    assert state == "cancelled"
    assert not any(pod.running for pod in sim.pods)


def test_the_loops_of_a_keeper_outlive_a_run_that_fails_at_everything(
    paths: ClusterPaths, sim: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    keeper = SimKeeper(paths, sim)
    bad, good = StubRun("bad", "keep_state", "cancel", "holds"), StubRun("good")
    keeper._runners = {"bad": bad, "good": good}  # type: ignore[dict-item]
    keeper._queue._running = [bad, good]  # type: ignore[list-item]
    waits = iter([False, True])
    keeper._closing.wait = lambda _timeout=None: next(waits)  # type: ignore[method-assign, assignment]
    server: Any = SimpleNamespace(mend=lambda: None)
    keeper._mend(server)
    keeper.close()
    keeper._fleet._links = []
    keeper._bring_held()
    assert good.asked == ["keep_state", "cancel", "holds"]
    assert bad.asked == good.asked


def test_a_take_over_outlives_a_run_without_a_folder(paths: ClusterPaths, sim: Simulation) -> None:
    first = SimKeeper(paths, sim)
    first._log.add("gone", DecisionKind.SUBMITTED, path=paths.root / "gone")
    first._do(request_of(sim))
    second = SimKeeper(paths, sim)
    second.take_over()
    assert list(second._runners) == [RUN]
    assert second._failed_runs["gone"]["state"] == "failed"
    assert "is gone" in str(second._failed_runs["gone"]["message"])
    third = SimKeeper(paths, sim)
    third.take_over()
    assert third._failed_runs["gone"] == second._failed_runs["gone"], "it ends once"


def test_an_error_on_a_pod_is_logged_once_until_the_pod_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def act(error: Exception | None) -> None:
        with isolate_pod_errors("pod-7", "acting"):
            if error is not None:
                raise error

    for error in (OSError("gone"), OSError("gone"), RunError("refused"), None, RunError("refused")):
        act(error)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["pod-7: acting: gone", *["pod-7: acting: refused"] * 2]
    with pytest.raises(ZeroDivisionError):
        act(ZeroDivisionError())
