"""One thread watches all pods of a run, whoever of them is silent, slow or lost."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.hostile_pod import PlayedLink
from tests.fakes.runloop import Simulation
from tests.support.poll import until
from workbench import Cluster, LocalPods, Script
from workbench.base.messages.lines import to_line
from workbench.jobs.script import Script as ScriptJob
from workbench.keeper.watch import pod as module
from workbench.keeper.watch.pod import PodReport, PodWatch, RunWatch
from workbench.rundir.status import cluster_status

SOON_S = 300.0


def held(request: dict[str, Any], _write: Callable[[bytes], None]) -> None:
    """Hold a poll for ever."""


def honest(request: dict[str, Any], write: Callable[[bytes], None]) -> None:
    """Answer as the agent of a rank that runs."""
    (rank,) = {re.findall(r"rank-(\d+)", name)[0] for name in request["offsets"]}
    ranks = [{"rank": int(rank), "phase": "running"}]
    answer = {"ranks": ranks, "chunks": {}, "live_processes": 1}
    write(to_line({"id": request["id"], "ok": True, **answer}))


class Watched:
    """Pods with played agents, and the watch of their run."""

    def __init__(self, folder: Path, tricks: list[Callable[..., object]], lease_s: float) -> None:
        sim = Simulation(
            folder, ScriptJob.from_dict({"path": "/home/me/train.py"}), pods=len(tricks)
        )
        sim.lease_s = lease_s
        self.links = [
            PlayedLink(pod.pod, folder, trick, lease_s=lease_s)  # type: ignore[arg-type]
            for pod, trick in zip(sim.pods, tricks, strict=True)
        ]
        context = sim.context().on(self.links)
        self.reports: queue.Queue[PodReport] = queue.Queue()
        self.watch = RunWatch([PodWatch(link, context, self.reports) for link in self.links])

    def next_of(self, name: str, *, answered: bool = True) -> PodReport:
        end_s = time.monotonic() + SOON_S
        while True:
            report = self.reports.get(timeout=max(0.0, end_s - time.monotonic()))
            if (report.pod.name, report.answered) == (name, answered):
                return report


@contextmanager
def watched(
    folder: Path, *tricks: Callable[..., object], lease_s: float = SOON_S
) -> Iterator[Watched]:
    with ExitStack() as stack:
        made = Watched(folder, list(tricks), lease_s)
        for link in made.links:
            for end in link._sockets:
                stack.callback(end.close)
            stack.callback(link.end)
        stack.callback(made.watch.close)
        yield made


def test_many_pods_take_one_thread(tmp_path: Path) -> None:
    with watched(tmp_path, *[honest] * 12) as made:
        before = threading.active_count()
        made.watch.start()
        for link in made.links:
            made.next_of(link.pod.name)
        assert threading.active_count() == before + 1
        made.watch.close()
        assert threading.active_count() == before


def test_a_pod_that_never_answers_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.keeper.link.agent._ANSWER_S", 0.2)
    with watched(tmp_path, held, honest) as made:
        made.watch.start()
        assert made.next_of("pod-0", answered=False).notes
        for _ in range(5):
            assert not made.next_of("pod-1").lost


def test_an_answer_that_another_thread_reads_is_taken_at_once(tmp_path: Path) -> None:
    asked = threading.Event()
    polls: list[Any] = []

    def later(request: dict[str, Any], write: Callable[[bytes], None]) -> None:
        polls.append((request, write))
        asked.set()

    with watched(tmp_path, later) as made:
        (link,) = made.links
        made.watch.start()
        assert asked.wait(SOON_S)
        (watch,) = made.watch._watches
        line = link._line
        assert line is not None
        with line._changed:
            line._reading = True  # as a thread that waits for another answer
        request, _ = polls[0]
        answer = {"ranks": [{"rank": 0, "phase": "running"}], "chunks": {}, "live_processes": 1}
        line._receive(to_line({"id": request["id"], "ok": True, **answer}))
        assert made.next_of("pod-0").live_processes == 1
        assert watch._failures == 0


def test_a_link_that_another_thread_closes_is_opened_again(tmp_path: Path) -> None:
    with watched(tmp_path, honest) as made:
        made.watch.start()
        made.next_of("pod-0")
        made.links[0].close()
        made.next_of("pod-0", answered=False)
        made.next_of("pod-0")


def test_the_end_of_a_watch_waits_for_no_answer(tmp_path: Path) -> None:
    asked = threading.Event()
    with watched(tmp_path, lambda *_: asked.set()) as made:
        made.watch.start()
        assert asked.wait(SOON_S)
        made.watch.close()
        assert not made.watch._thread.is_alive()
        assert made.links[0]._line is not None
        assert not made.links[0]._line._calls, "the late answer is dropped"


def test_a_pod_that_is_lost_as_the_watch_ends_is_reported(tmp_path: Path) -> None:
    with watched(tmp_path, honest) as made:
        made.watch.start()
        made.next_of("pod-0")
        (watch,) = made.watch._watches
        watch._end.set()
        watch._fall_silent(OSError("the line broke"))
        assert made.next_of("pod-0", answered=False).notes


def test_without_a_free_thread_a_silent_pod_is_lost_after_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched(tmp_path, honest, honest, lease_s=2.0) as made:
        made.watch.start()
        made.next_of("pod-0")

        class NoThread(threading.Thread):
            def start(self) -> None:
                raise RuntimeError("can't start new thread")

        monkeypatch.setattr(module.threading, "Thread", NoThread)
        made.links[0].close()
        while not (report := made.next_of("pod-0", answered=False)).lost:
            assert not made.next_of("pod-1").lost
        assert "no sign from pod-0" in report.lost


@pytest.mark.slow
def test_the_keeper_has_eight_threads_and_one_for_each_pod(tmp_path: Path) -> None:
    """Login nodes count the threads of a user; 32 pods are to take 40."""
    (tmp_path / "quiet.py").write_text("import time\ntime.sleep(6000)\n")
    job = Script(str(tmp_path / "quiet.py"))
    pods = 3
    with Cluster(LocalPods(), count=pods, path=tmp_path / "cluster", warm=False) as cluster:
        run = cluster.submit(job)
        until(lambda: run.state == "running", SOON_S, every_s=0.2, why=lambda: run.message)
        tasks = Path(f"/proc/{cluster_status(cluster.path).pid}/task")
        until(lambda: len(list(tasks.iterdir())) <= 8 + pods, SOON_S, every_s=0.2)
        run.cancel()
