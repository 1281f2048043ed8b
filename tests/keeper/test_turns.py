"""Which run has its turn, on which pods, and when an unused cluster closes: no process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.poll import until
from workbench.keeper import run_queue as module
from workbench.keeper.run_queue import IdleTime, RunQueue

NEVER = "the cluster was closed before it started"


class Hand:
    """Two clocks that are moved by hand together."""

    def __init__(self) -> None:
        self.now = 100.0
        self.epoch_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.epoch_s


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=hand))
    monkeypatch.setattr(module, "now_s", hand.wall)
    return hand


# An unused cluster.


def idle_of(limit_s: float | None) -> tuple[IdleTime, list[float | None]]:
    """Return the idle time of a cluster, and the shutdowns that it announces."""
    announced: list[float | None] = []
    idle = IdleTime(limit_s, lambda: announced.append(idle.end_s))
    return idle, announced


def test_a_cluster_without_a_limit_never_closes(hand: Hand) -> None:
    idle, announced = idle_of(None)
    hand.now += 1e9
    assert not idle.is_over()
    assert announced == []


def test_an_unused_cluster_closes_at_its_limit(hand: Hand) -> None:
    idle, announced = idle_of(600.0)
    assert not idle.is_over()
    assert announced == [hand.wall() + 600.0]
    hand.now += 599.5
    assert not idle.is_over()
    hand.now += 0.5
    assert idle.is_over()
    assert len(announced) == 1


def test_each_use_moves_the_end_and_a_small_shift_is_not_announced(hand: Hand) -> None:
    idle, announced = idle_of(600.0)
    idle.is_over()
    first_s = hand.wall() + 600.0
    hand.now += 9.0
    idle.use()
    idle.is_over()
    assert announced == [first_s]
    hand.now += 2.0
    idle.use()
    idle.is_over()
    assert announced == [first_s, first_s + 11.0]
    hand.now += 595.0
    assert not idle.is_over()


def test_a_short_limit_announces_smaller_shifts(hand: Hand) -> None:
    idle, announced = idle_of(20.0)
    idle.is_over()
    for after_s, count in ((1.9, 1), (0.2, 2)):
        hand.now += after_s
        idle.use()
        idle.is_over()
        assert len(announced) == count


def test_an_end_within_a_second_is_announced_too(hand: Hand) -> None:
    idle, announced = idle_of(0.8)
    assert not idle.is_over()
    assert announced == [hand.wall() + 0.8]


def test_a_run_takes_the_announcement_back(hand: Hand) -> None:
    idle, announced = idle_of(600.0)
    idle.is_over()
    idle.suspend()
    assert (idle.end_s, announced[1:]) == (None, [None])
    idle.is_over()
    assert announced[2:] == [hand.wall() + 600.0]


# Turns.


class StubRun:
    """A run that lasts until it may end."""

    def __init__(self, name: str, *links: str, **facts: bool) -> None:
        self.context: Any = SimpleNamespace(
            run_id=name,
            links=list(links) or ["one"],
            inherited=facts.get("inherited", False),
            may_have_ranks=facts.get("may_have_ranks", False),
        )
        self.wanted = len(links) or 1
        self.over = False
        self.runs = threading.Event()
        self.may_end = threading.Event()
        self.abandoned = ""
        self.asked: list[str] = []

    def enqueue(self) -> None:
        self.asked.append("enqueue")

    def move(self, links: Sequence[str]) -> None:
        self.asked.append("move")
        self.context.links = links

    def run(self) -> None:
        self.runs.set()
        assert self.may_end.wait(300)

    def abandon(self, why: str) -> None:
        self.abandoned = why

    def fail(self, error: Exception) -> None:
        self.over = True


class StubFleet:
    """Three pods: the first free ones are given."""

    def free(self, count: int, busy: Sequence[str]) -> list[str] | None:
        free = [name for name in ("one", "two", "three") if name not in busy]
        return free[:count] if len(free) >= count else None


class Turns:
    """A queue whose loop runs in a thread."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self.announced: list[object] = []
        fleet: Any = StubFleet()
        self.idle = IdleTime(None, lambda: self.announced.append(self.idle.end_s))
        self.queue: Any = RunQueue(fleet, self.idle, self.closing)
        self.runs: list[StubRun] = []
        self.end_when_idle: Callable[[], None] = self.closing.set
        self.thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        self.queue.run_in_order(self.end_when_idle, NEVER)

    def add(self, *runs: StubRun) -> None:
        for run in runs:
            self.runs.append(run)
            self.queue.add(run)

    def close(self) -> None:
        self.closing.set()
        for run in self.runs:
            run.may_end.set()
        self.thread.join(300)
        assert not self.thread.is_alive()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    monkeypatch.setattr(module, "_TICK_S", 0.02)
    turns = Turns()
    yield turns
    if turns.thread.is_alive():
        turns.close()


def began(run: StubRun) -> bool:
    return run.runs.wait(300)


def test_a_run_starts_on_free_pods_beside_another(turns: Turns) -> None:
    first, second = StubRun("first", "one"), StubRun("second", "one", "two")
    turns.add(first, second)
    turns.thread.start()
    assert began(first) and began(second)
    assert first.asked == ["enqueue"], "its pods were free"
    assert second.asked == ["enqueue", "move"]
    until(lambda: turns.queue.running == (first, second), 20)
    assert turns.queue.busy == ["one", "two", "three"]
    until(lambda: turns.announced == [None, None], 20)


def test_no_run_overtakes_one_that_needs_more_pods(turns: Turns) -> None:
    first, wide, last = StubRun("a"), StubRun("b", "one", "two", "three"), StubRun("c")
    turns.add(first, wide, last)
    turns.thread.start()
    assert began(first)
    assert not last.runs.wait(0.3)
    first.may_end.set()
    assert began(wide)
    wide.may_end.set()
    assert began(last)


def test_a_run_of_a_dead_keeper_waits_for_its_own_pods(turns: Turns) -> None:
    first = StubRun("first", "two", inherited=True)
    second = StubRun("second", "one", "two", inherited=True)
    turns.add(first, second)
    turns.thread.start()
    assert began(first)
    assert not second.runs.wait(0.3), "another run has one of its pods"
    first.may_end.set()
    assert began(second)
    assert second.asked == ["enqueue"], "it does not move"


def test_a_run_that_cannot_move_is_left_out(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_links: object) -> None:
        raise OSError("a read-only folder")

    bad, good = StubRun("bad", "three"), StubRun("good")
    monkeypatch.setattr(bad, "move", refuse)
    turns.add(bad, good)
    turns.thread.start()
    assert began(good)
    assert bad.over
    assert not bad.runs.is_set()


def test_runs_start_one_after_another_without_a_pause(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that cannot move, and a run that has started, let the next one start at once."""

    def refuse(_links: object) -> None:
        raise OSError("a read-only folder")

    monkeypatch.setattr(module, "_TICK_S", 60.0)
    bad, first, second = StubRun("bad", "three"), StubRun("first"), StubRun("second")
    monkeypatch.setattr(bad, "move", refuse)
    turns.add(bad, first, second)
    turns.thread.start()
    assert began(first) and began(second)
    first.may_end.set()
    second.may_end.set()
    turns.closing.set()
    with turns.queue.lock:
        turns.queue.lock.notify_all()


def test_a_run_starts_once_a_thread_is_free(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, left = threading.Thread.start, [3]

    def start(thread: threading.Thread) -> None:
        if thread.name == "run" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        whole(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    first = StubRun("first")
    turns.add(first)
    turns.thread.start()
    assert began(first)
    assert left == [0]
    until(lambda: turns.queue.running == (first,), 20)


def test_a_run_that_waits_can_be_withdrawn(turns: Turns) -> None:
    first, second = StubRun("first", "one", "two", "three"), StubRun("second")
    turns.add(first, second)
    turns.thread.start()
    assert began(first)
    assert turns.queue.withdraw(second) is True
    assert second.abandoned
    assert turns.queue.withdraw(second) is False
    assert turns.queue.withdraw(first) is False, "it runs"
    assert not first.abandoned
    first.may_end.set()
    assert not second.runs.wait(0.3)


def test_a_run_with_ranks_of_a_dead_keeper_is_not_withdrawn(turns: Turns) -> None:
    run = StubRun("first", may_have_ranks=True)
    turns.add(run)
    assert turns.queue.withdraw(run) is False
    turns.thread.start()
    assert began(run)


def test_a_closing_cluster_waits_for_its_run_and_ends_those_that_wait(turns: Turns) -> None:
    first, second = StubRun("first", "one", "two", "three"), StubRun("second")
    turns.add(first, second)
    turns.thread.start()
    assert began(first)
    turns.closing.set()
    turns.thread.join(0.3)
    assert turns.thread.is_alive(), "the first run is not over"
    assert not second.abandoned
    first.may_end.set()
    turns.thread.join(300)
    assert (first.abandoned, second.abandoned) == ("", NEVER)
    assert not second.runs.is_set()


def test_a_cluster_counts_as_unused_only_without_runs(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[object, ...]] = []

    def end() -> None:
        ended.append(turns.queue.running)
        turns.closing.set()

    turns.end_when_idle = end
    monkeypatch.setattr(turns.idle, "is_over", lambda: True)
    first, wide = StubRun("first"), StubRun("wide", "one", "two", "three")
    turns.add(first, wide)
    turns.thread.start()
    assert began(first)
    turns.thread.join(0.3)
    assert ended == [], "one runs, and one waits"
    first.may_end.set()
    assert began(wide)
    assert ended == []
    wide.may_end.set()
    until(lambda: ended == [()], 20)


def test_the_end_of_a_run_counts_as_a_use(turns: Turns) -> None:
    first = StubRun("first")
    turns.add(first)
    turns.thread.start()
    assert began(first)
    before = turns.idle._used
    first.may_end.set()
    until(lambda: turns.idle._used > before, 20)


def test_a_cluster_counts_as_unused_from_the_start_of_its_queue(turns: Turns) -> None:
    before = turns.idle._used
    turns.thread.start()
    until(lambda: turns.idle._used > before, 20)
