"""Memory of ranks with many processes is watched at a cost that harms nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.poll import until
from workbench.agent import main
from workbench.agent.machine import Resident
from workbench.agent.ranks import memory
from workbench.agent.ranks.memory import MemoryWatch
from workbench.agent.supervisor import Agent
from workbench.agent.tasks import Tasks
from workbench.base.messages.wire import listen
from workbench.base.process import look_up

GIB = 1 << 30


def has_seen(watch: MemoryWatch, pids: list[int]) -> bool:
    """Whether an exact look has seen all these processes."""
    return all(pid in watch._shares for pid in pids)


FORKS = """
import os, sys, time
held = bytearray(1 << 30)
held[:: 4096] = b"x" * len(held[:: 4096])
workers = []
for _ in range(230):
    pid = os.fork()
    if not pid:
        time.sleep(600)
    workers.append(pid)
print("forked", flush=True)
sys.stdin.close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
for pid in workers:
    os.kill(pid, 9)
"""


@pytest.fixture
def processes() -> Iterator[list[int]]:
    """Two sleeping processes of this test."""
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process.pid)
        yield started


@given(
    sizes=st.dictionaries(
        st.integers(1, 6),
        st.tuples(st.integers(0, GIB), st.integers(0, GIB)).map(
            lambda pair: Resident(sum(pair), sum(pair), pair[1])
        ),
    ),
    parents=st.dictionaries(st.integers(1, 6), st.integers(0, 6)),
    seen=st.sets(st.integers(1, 6)),
)
def test_the_memory_of_processes_is_between_that_of_the_largest_and_of_all(
    sizes: dict[int, Resident], parents: dict[int, int], seen: set[int]
) -> None:
    watch = MemoryWatch(Tasks())
    rows = [[pid, size.own_bytes // 2, size.shared_bytes // 2, size.bytes, size.shared_bytes]
            for pid, size in sizes.items() if pid in seen]  # fmt: skip
    watch._take({"shares": rows})
    every = [size.bytes for size in sizes.values()]
    assert max(every, default=0) <= watch.total(sizes, parents) <= sum(every)


def test_a_program_that_another_started_counts_as_a_whole_and_a_fork_does_not() -> None:
    watch = MemoryWatch(Tasks())
    shell, python, fork = Resident(3, 3, 0), Resident(900, 900, 0), Resident(890, 890, 0)
    assert watch.total({1: shell, 2: python}, {2: 1}) == 900
    assert watch.total({2: python, 3: fork}, {3: 2}) == 900
    # What the fork wrote since the last exact look is its own.
    watch._take({"shares": [[2, 450, 0, 900, 0], [3, 450, 0, 890, 0]]})
    assert watch.total({2: python, 3: Resident(990, 990, 0)}, {3: 2}) == 1000


def test_shared_memory_counts_once() -> None:
    watch = MemoryWatch(Tasks())
    sizes = {pid: Resident(800, 800, 700) for pid in (1, 2, 3)}
    assert watch.total(sizes, {}) == 3 * 100 + 700


def test_an_agent_works_on_while_a_look_is_slow(
    tmp_path: Path, processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = tmp_path / "go-on"

    def slow(_pid: int) -> tuple[int, int]:
        until(go_on.exists, 300)
        return 1, 1

    monkeypatch.setattr(memory, "_exact_share", slow)
    agent = Agent(tmp_path / "pod", lease_s=600)
    agent._memory.look([processes])
    for _ in range(5):
        agent.tick()
        agent._memory.look([processes])
        assert not has_seen(agent._memory, processes)
    go_on.touch()
    until(lambda: agent._memory.look([processes]) or has_seen(agent._memory, processes), 60)


def test_quiet_ranks_are_looked_at_half_as_often_until_one_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(tmp_path / "pod", lease_s=600)
    rank = SimpleNamespace(rss_bytes=5, cpu_s=1.0)
    looks: list[float] = []

    def sample(*_: object) -> list[set[int]]:
        looks.append(now)
        return []

    run: Any = SimpleNamespace(live=True, hurried=False, ranks={0: rank}, sample=sample)
    monkeypatch.setattr(agent, "_runs", {"run": run})
    now = 100.0
    for tenths in range(1000, 1200):
        now = tenths / 10
        if now == 110.0:
            rank.cpu_s += 0.01
        if now >= 115.0:
            rank.rss_bytes += 1
        agent._sample(now)
    assert looks[:7] == [100.0, 101.0, 103.0, 105.0, 107.0, 109.0, 111.0]
    # The first look after a change is followed by the next after a second.
    assert looks[7:] == [112.0, 114.0, 116.0, 117.0, 118.0, 119.0]


@pytest.mark.parametrize("expensive", [1, 2], ids=["first", "last"])
def test_a_look_beyond_its_budget_is_not_repeated_soon(
    processes: list[int], monkeypatch: pytest.MonkeyPatch, expensive: int
) -> None:
    now = 0.0
    begun = []

    class Counted(Tasks):
        def begin(self, work):  # type: ignore[no-untyped-def]
            begun.append(work)
            return super().begin(work)

    used_s = 0.0
    looks = 0

    def look(_pid: int) -> tuple[int, int]:
        nonlocal used_s, looks
        looks += 1
        used_s += 10.0 if looks == expensive else 0.1
        return 1, 1

    monkeypatch.setattr(memory, "_exact_share", look)
    monkeypatch.setattr(memory.time, "process_time", lambda: used_s)
    tasks = Counted()
    watch = MemoryWatch(tasks)
    monkeypatch.setattr(memory.time, "monotonic", lambda: now)
    watch.look([processes])
    monkeypatch.undo()
    until(lambda: watch.look([processes]) or watch._task is None, 60)
    watch.look([processes])
    assert len(begun) == 1 and has_seen(watch, processes) == (expensive == 2)


def test_exact_looks_are_a_minute_apart_and_in_another_process(
    processes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [100.0]
    looks = tmp_path / "looks"

    def look(_pid: int) -> tuple[int, int]:
        with looks.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return 1, 1

    monkeypatch.setattr(memory, "_exact_share", look)
    watch = MemoryWatch(Tasks())

    def done() -> bool:
        with monkeypatch.context() as frozen:
            frozen.setattr(memory.time, "monotonic", lambda: clock_s[0])
            watch.look([processes])
        return watch._task is None

    assert not done()
    until(done, 120)
    for clock_s[0] in (101.0, 130.0, 159.0):
        assert done(), "no look is due"
    clock_s[0] = 160.0
    assert not done()
    until(done, 120)
    lookers = looks.read_text().split()
    assert len(lookers) == 4 and str(os.getpid()) not in lookers


def test_an_agent_at_work_is_not_taken_for_hung(tmp_path: Path) -> None:
    waited_s = [1.0]
    agent = look_up(os.getpid())
    assert agent is not None
    used_s = main.activity(agent.pid)[0]
    assert main._is_at_work(tmp_path, agent, used_s - 1), "it used CPU"
    assert not main._is_at_work(tmp_path, agent, used_s + 1000), "no CPU, and no sign of life"
    with listen(tmp_path / main._LIFE, socket.SOCK_STREAM) as life:
        shown = threading.Thread(
            target=main._show_life, args=[life, SimpleNamespace(waited_s=lambda: waited_s[0])]
        )
        shown.daemon = True
        shown.start()
        assert main._is_at_work(tmp_path, agent, used_s + 1000), "its thread answers"
        waited_s[0] = 1000.0
        assert not main._is_at_work(tmp_path, agent, used_s + 1000), "its loop stands still"


def test_a_rank_with_230_workers_runs_to_its_end(agent, tmp_path: Path) -> None:
    end = tmp_path / "end"
    agent.start("r", FORKS, argv=[sys.executable, "-c", FORKS, str(end)])
    agent.until_printed("r", "forked", 300)
    pid = agent.pid
    sizes = []
    for _ in range(30):
        sizes.append(agent.poll("r")["ranks"][0]["rss_bytes"])
        until(lambda: agent.poll("r")["ranks"][0]["rss_bytes"], 60)
    assert agent.serve_only() == pid
    assert max(sizes) < 2 * GIB
    end.touch()
    (rank,) = agent.until_exited("r", 300)["ranks"]
    assert rank["exit_code"] == 0 and rank["done"]
    assert GIB < rank["peak_rss_bytes"] < 2 * GIB
