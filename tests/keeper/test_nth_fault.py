"""One call fails, whichever it is: a run ends with a true result, and the queue goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.runloop import Fate, Plan, SimLink, SimPod, Simulation
from tests.keeper.acts import script
from tests.support.poll import until
from workbench.base.errors import RemoteError
from workbench.base.files import read_json
from workbench.keeper.run_queue import IdleTime, RunQueue

CALLS = ("call", "work", "run", "put", "put_file", "write", "open")
"""The calls that reach a pod."""
MOST = 40
"""More calls than a run makes."""


class FailingLink(SimLink):
    """A line whose n-th call of all lines of the run fails, once or from then on."""

    sim: FaultySimulation


def _failing(name: str) -> Callable[..., Any]:
    def call(self: FailingLink, *args: Any, **options: Any) -> Any:
        self.sim.count(self.of)
        return getattr(SimLink, name)(self, *args, **options)

    return call


for _name in CALLS:
    setattr(FailingLink, _name, _failing(_name))


class FaultySimulation(Simulation):
    def __init__(self, *args: Any, nth: int, then: str, **options: Any) -> None:
        self.nth, self.then, self.calls = nth, then, 0
        super().__init__(*args, **options)

    def link(self, pod: SimPod) -> SimLink:
        return FailingLink(pod)

    def count(self, pod: SimPod) -> None:
        with self._lock:
            self.calls += 1
            if self.calls != self.nth:
                return
            if self.then == "gone":
                pod.vanish()
            elif self.then == "silent":
                pod.silence()
        raise RemoteError(f"lost the line to {pod.pod.name}", host=pod.pod.address)


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("then", ["answers", "gone", "silent"])
def test_a_run_whose_nth_call_of_a_pod_fails_has_a_true_end(
    then: str, restarts: int, tmp_path: Path
) -> None:
    for nth in range(1, MOST):
        job = script(restarts=restarts)
        plans = [Plan(others=Fate(1.0))]
        sim = FaultySimulation(tmp_path / str(nth), job, plans, pods=2, nth=nth, then=then)
        runner = sim.submitted()
        state = str(runner.run())
        where = f"call {nth}: {state}: {runner.outcome['message']}"
        assert sim.wrong == [], where
        assert read_json(sim.paths.result)["state"] == state, where
        decided = runner.context.log.of(runner.context.run_id)
        assert decided is not None and decided.outcome["state"] == state, where
        assert state in ("succeeded", "failed"), where
        assert runner.outcome["message"], where
        if state == "succeeded":
            ended = [rank for pod in sim.pods for rank in pod.ranks.values()]
            assert all(rank.done for rank in ended), where
        assert not [pod for pod in sim.pods if pod.mood == "answers" and pod.running], where
        if sim.calls < nth:
            assert state == "succeeded" and nth > 10, where
            return
    raise AssertionError(f"a run makes more than {MOST} calls")


class Faults:
    """Calls of the queue to its runs, its fleet and its threads; the n-th fails."""

    def __init__(self, nth: int) -> None:
        self.nth, self.calls = nth, 0

    def pass_by(self) -> None:
        self.calls += 1
        if self.calls == self.nth:
            raise OSError(28, "No space left on device")


class FaultyRun:
    def __init__(self, name: str, faults: Faults) -> None:
        facts = {"inherited": False, "may_have_ranks": False}
        self.context: Any = SimpleNamespace(run_id=name, links=["one"], **facts)
        self.wanted = 1
        self.over = False
        self.end = ""
        self._faults = faults

    def enqueue(self) -> None:
        self._faults.pass_by()

    def move(self, links: Sequence[str]) -> None:
        self._faults.pass_by()
        self.context.links = links

    def run(self) -> None:
        try:
            self._faults.pass_by()
        finally:
            self.over, self.end = True, self.end + "ran"

    def abandon(self, _why: str) -> None:
        self.over, self.end = True, self.end + "abandoned"
        self._faults.pass_by()

    def fail(self, _error: Exception) -> None:
        self.over, self.end = True, self.end + "failed"


class TwoPods:
    def free(self, count: int, busy: Sequence[str]) -> list[str] | None:
        free = [name for name in ("two", "one") if name not in busy]
        return free[:count] or None


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    started: list[threading.Thread] = []
    yield started
    for thread in started:
        thread.join(300)


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_queue_whose_nth_call_fails_goes_on(nth: int, threads: list[threading.Thread]) -> None:
    faults, closing = Faults(nth), threading.Event()
    fleet: Any = TwoPods()
    queue: Any = RunQueue(fleet, IdleTime(None, lambda: None), closing)
    runs = [FaultyRun(name, faults) for name in "abcd"]
    taken = []
    for run in runs:
        try:
            queue.add(run)
            taken.append(run)
        except OSError:
            assert run not in queue._waiting, "a run that was refused never starts"
    assert len(taken) >= len(runs) - 1
    withdrawn = taken.pop()
    assert queue.withdraw(withdrawn)
    loop = threading.Thread(target=queue.run_in_order, args=(closing.set, "closed"), daemon=True)
    threads.append(loop)
    loop.start()
    until(lambda: all(run.over for run in taken) and not queue.running, 60)
    assert loop.is_alive()
    closing.set()
    loop.join(300)
    assert not loop.is_alive()
    assert {run.end for run in taken} <= {"ran", "failed"}
    assert withdrawn.end == "abandoned"
