"""What a watch reports of its pod, and when it gives the pod up: no process, and no thread."""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sentences import says
from workbench.base.errors import PodError, RemoteError
from workbench.base.redact import Redactor
from workbench.jobs.job import Traits
from workbench.keeper.watch import pod as module
from workbench.keeper.watch.pod import PodReport, PodWatch, Sampler, why_agent_lost
from workbench.pods.pod import Phase, Pod
from workbench.rundir.figures.samples import Sample
from workbench.rundir.outcome import RankStatus
from workbench.rundir.output.collect import Collector
from workbench.rundir.paths import RunPaths

POD = Pod(name="pod-0", address="127.0.0.2")
LEASE_S = 40.0
RUNNING = {"rank": 0, "phase": "running"}
EXITED = {"rank": 0, "phase": "exited", "exit_code": 0}


class Hand:
    """The clock of a keeper, which never sleeps unless a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleep_of = ""

    def __call__(self) -> float:
        return self.now

    def slept(self, within_s: float, at_least_s: float) -> str:
        self.asked = within_s, at_least_s
        return self.sleep_of


class End:
    """The end of a watch. Each wait moves the clock; the watch ends after some time."""

    def __init__(self, hand: Hand, after_s: float) -> None:
        self.waits: list[float] = []
        self._hand, self._ends = hand, hand.now + after_s

    def is_set(self) -> bool:
        return self._hand.now >= self._ends

    def wait(self, seconds: float) -> None:
        self.waits.append(round(seconds, 3))
        self._hand.now += seconds


class Agent:
    """An agent that answers, is silent, or is replaced, as a test says."""

    def __init__(self) -> None:
        self.pod = POD
        self.agent_pid = 1
        self.agent_replaced = ""
        self.clock_offset_s = 2.0
        self.answers: dict[str, object] = {"ranks": [RUNNING], "chunks": {}, "live_processes": 1}
        self.asked: list[dict[str, object]] = []
        self.silent = False
        self.opens: Callable[[], object] = lambda: None
        self.then: Callable[[], object] = lambda: None

    def post(self, op: str, _arrived: Callable[[], None], **fields: object) -> Any:
        assert op == "poll"
        self.asked.append(fields)
        self.then()
        if self.silent:
            raise RemoteError("lost the line to pod-0", host=POD.address)
        return SimpleNamespace(line=SimpleNamespace(lost=""), left_s=8.0)

    def answer(self, _posted: object) -> dict[str, object]:
        return self.answers

    def open(self) -> None:
        self.opens()


class AtOnce(threading.Thread):
    """A thread that has ended when it has started."""

    def start(self) -> None:
        self.run()

    def is_alive(self) -> bool:
        return False


class Watched:
    """A pod, its watch, and what was reported."""

    def __init__(self, folder: Path, hand: Hand, *, for_s: float = 1.0, links: int = 1) -> None:
        self.agent = Agent()
        self.hand = hand
        self.seen: list[Pod] = [POD]
        paths = RunPaths(folder)
        paths.logs.mkdir()
        spec = SimpleNamespace(
            cluster=SimpleNamespace(lease_s=LEASE_S), job=SimpleNamespace(traits=Traits())
        )
        context: Any = SimpleNamespace(
            run_id="r",
            restart=0,
            links=[self.agent] * links,
            paths=paths,
            ranks_on=lambda _link: [0],
            redact=Redactor(),
            spec=spec,
            refresh=lambda: self.seen,
        )
        self.paths = paths
        self._reports: queue.Queue[PodReport] = queue.Queue()
        self.watch = PodWatch(self.agent, context, self._reports)  # type: ignore[arg-type]
        self.end = End(hand, for_s)
        self.watch._end = self.end  # type: ignore[assignment]

    def reports(self) -> Sequence[PodReport]:
        """Watch the pod until the end; return the reports."""
        while not self.end.is_set() and self.watch.due_s < math.inf:
            self.watch.turn()
            if self.watch._posted is not None:
                self.watch.turn()
            if self.hand.now < self.watch.due_s < math.inf:
                self.end.wait(self.watch.due_s - self.hand.now)
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(module, "uptime_clock", hand)
    monkeypatch.setattr(module.threading, "Thread", AtOnce)
    return hand


@pytest.fixture
def watched(tmp_path: Path, hand: Hand) -> Watched:
    return Watched(tmp_path, hand)


# Answers.


def test_a_pod_is_asked_some_times_a_second(watched: Watched) -> None:
    reports = watched.reports()
    assert len(reports) == 7
    assert set(watched.end.waits) == {0.15}
    assert {field["run"] for field in watched.agent.asked} == {"r"}


def test_pods_of_a_large_run_are_asked_less_often(tmp_path: Path, hand: Hand) -> None:
    watched = Watched(tmp_path, hand, for_s=9.0, links=400)
    watched.reports()
    assert set(watched.end.waits) == {2.0}


def test_a_report_has_the_state_of_ranks_processes_and_gpus(watched: Watched) -> None:
    error = {"kind": "ValueError", "message": "a bad row", "time_s": 12.0}
    watched.agent.answers = {
        "ranks": [{**EXITED, "error": error, "ended_s": 12.0}],
        "live_processes": 0,
        "chunks": {},
        "gpus": [{"index": 1, "percent": 80, "used_gib": 3.5}, {"percent": 5.0}],
        "full": "no space on pod-0",
        "removed": "logs were removed",
    }
    report = watched.reports()[0]
    assert report.answered and not report.lost
    (rank,) = report.ranks
    assert (rank.phase, rank.ended_s) == ("exited", 10.0), "on the clock of this machine"
    assert rank.error is not None and rank.error.time_s == 10.0
    assert report.live_processes == 0
    assert report.gpus == [{"index": 1, "percent": 80.0, "used_gib": 3.5}, {"percent": 5.0}]
    assert type(report.gpus[0]["index"]) is int
    assert (report.full, report.removed) == ("no space on pod-0", "logs were removed")
    assert report.drained


@pytest.mark.parametrize(
    ("letters", "phase", "pauses_less"),
    [(0, "running", 0), (3 << 20, "running", 1), (0, "exited", 1)],
)
def test_more_output_is_read_without_a_pause_and_events_have_this_machine_s_time(
    watched: Watched, letters: int, phase: str, pauses_less: int
) -> None:
    line = b'@workbench {"time_s": 12.0, "rank": 0, "kind": "step", "step": 1}\n'
    output = line + b"." * letters
    chunks = {"attempt-0/rank-0.stdout.log": {"offset": 0, "data": output.decode()}}

    def once() -> None:
        if len(watched.agent.asked) > 1:
            watched.agent.answers = {**watched.agent.answers, "chunks": {}}

    watched.agent.then = once
    watched.agent.answers = {
        **watched.agent.answers,
        "ranks": [{**RUNNING, "phase": phase}],
        "chunks": chunks,
    }
    first, second = watched.reports()[:2]
    assert (first.drained, second.drained) == (False, True)
    assert [event.time_s for event in first.events] == [10.0]
    assert watched.paths.rank_log(0, 0, "stdout").read_bytes() == output
    assert len(watched.agent.asked) == len(watched.end.waits) + pauses_less
    assert watched.agent.asked[0]["phases"] == {}
    assert watched.agent.asked[1]["phases"] == {"0": phase}


def test_logs_that_failed_are_tried_once_more_after_the_end(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = [True]
    monkeypatch.setattr(Collector, "try_last", lambda _self: bool(tries and tries.pop()))
    watched.agent.answers = {"ranks": [RUNNING], "chunks": {}, "live_processes": 1}
    assert watched.reports()[0].drained, "some ranks run"
    assert tries == [True]
    watched.end._ends += 1.0
    watched.agent.answers = {"ranks": [EXITED], "chunks": {}, "live_processes": 0}
    assert [report.drained for report in watched.reports()[:2]] == [False, True]


def test_the_reason_of_an_incomplete_log_is_reported(watched: Watched) -> None:
    watched.watch._collector.cut["attempt-0/rank-0.stdout.log"] = "the disk here is full"
    assert watched.reports()[0].cut == "the disk here is full"


@pytest.mark.parametrize("odd", [{"live_processes": -1}, {"live_processes": "x"}, {"ranks": [{}]}])
def test_an_answer_of_another_form_ends_the_watch(odd: dict[str, object], watched: Watched) -> None:
    watched.agent.answers = {**watched.agent.answers, **odd}
    (report,) = watched.reports()
    assert not report.answered
    assert "pod-0" in report.lost


# Silence.


def test_a_silent_pod_is_lost_after_a_lease(tmp_path: Path, hand: Hand) -> None:
    watched = Watched(tmp_path, hand, for_s=1000.0)
    watched.agent.silent = True
    began = hand.now
    reports = watched.reports()
    assert not any(report.answered for report in reports)
    assert [bool(report.lost) for report in reports] == [False] * (len(reports) - 1) + [True]
    assert LEASE_S <= hand.now - began <= LEASE_S + 2.0
    assert [len(report.notes) for report in reports] == [1] + [0] * (len(reports) - 1)
    # Each pause is twice as long, up to a part of the lease.
    assert watched.end.waits[:4] == [0.5, 1.0, 2.0, 2.0]
    assert set(watched.end.waits[3:]) == {2.0}


def test_a_pod_that_answers_again_has_a_whole_lease(
    tmp_path: Path, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = Watched(tmp_path, hand, for_s=110.0)
    began = hand.now

    def moody() -> None:
        seconds = hand.now - began
        watched.agent.silent = 10 < seconds < 40 or 45 < seconds < 75

    watched.agent.then = moody
    reports = watched.reports()
    assert not any(report.lost for report in reports)
    assert sum(len(report.notes) for report in reports) == 2
    answers = [record for record in caplog.records if record.levelno == logging.INFO]
    assert len(answers) == 2
    seconds = answers[0].args[1]  # type: ignore[index]
    assert isinstance(seconds, float) and 29.0 < seconds < 35.0
    assert watched.end.waits.count(0.5) == 2, "the pauses begin anew"


def test_a_pod_that_its_platform_ended_is_lost_at_once(watched: Watched) -> None:
    watched.agent.silent = True
    watched.seen = [
        Pod(name="pod-1", phase=Phase.FAILED, message="another"),
        replace(POD, phase=Phase.FAILED, message="evicted"),
    ]
    (report,) = watched.reports()
    assert "evicted" in report.lost
    assert watched.end.waits == []


def test_an_ended_pod_without_a_message_is_lost_too(watched: Watched) -> None:
    watched.agent.silent = True
    watched.seen = [replace(POD, phase=Phase.FAILED)]
    (report,) = watched.reports()
    assert says(report.lost, "the place it came from says no more")


@pytest.mark.parametrize(
    "error",
    [
        RemoteError("no line", host=POD.address),
        PodError("no pod"),
        OSError("no route"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_line_that_cannot_be_opened_is_tried_again(
    error: Exception, tmp_path: Path, hand: Hand
) -> None:
    watched = Watched(tmp_path, hand, for_s=12.0)
    watched.agent.silent = True

    def refuse() -> None:
        raise error

    watched.agent.opens = refuse
    reports = watched.reports()
    assert len(reports) > 3
    assert not any(report.lost for report in reports)


def test_another_agent_means_that_the_ranks_are_lost(watched: Watched) -> None:
    watched.agent.silent = True

    def replaced() -> None:
        watched.agent.agent_pid = 2

    watched.agent.opens = replaced
    first, second = watched.reports()
    assert (first.answered, first.lost) == (False, "")
    assert not second.answered
    assert "pod-0" in second.lost


def test_the_same_agent_is_watched_again(watched: Watched) -> None:
    watched.agent.silent = True

    def back() -> None:
        watched.agent.silent = False

    watched.agent.opens = back
    reports = watched.reports()
    assert [report.answered for report in reports[:2]] == [False, True]
    assert not any(report.lost for report in reports)


def test_the_loss_of_an_agent_has_the_best_known_cause(hand: Hand) -> None:
    link: Any = SimpleNamespace(pod=POD, agent_replaced="")
    killed = why_agent_lost(link, LEASE_S)
    assert hand.asked == (LEASE_S, LEASE_S / 2)
    link.agent_replaced = "was replaced by a newer one"
    assert "was replaced by a newer one" in why_agent_lost(link, LEASE_S)
    hand.sleep_of = "this machine slept for 60 s"
    slept = why_agent_lost(link, LEASE_S)
    assert says(slept, "or only its keeper was stopped", "this machine slept for 60 s")
    assert says(killed, "the ranks on the pod died with the agent", "pod-0")
    assert says(killed, "the agent was killed")


# Samples.


def report(
    pod: Pod = POD, *, gib: float = 1.0, phase: str = "running", cpu_s: float = 0.0, **more: Any
) -> PodReport:
    ranks = [
        RankStatus(rank=number, pod=pod, phase=phase, rss_bytes=round(gib * 2**30), cpu_s=cpu_s)
        for number in (0, 1)
    ]
    return PodReport(pod=pod, ranks=ranks, **more)


def test_memory_is_sampled_every_some_seconds_by_pod(hand: Hand) -> None:
    sampler = Sampler(hand)
    gpus = [{"index": 0, "percent": 80.0}]
    sample = sampler.sample(report(gib=1.23456, gpus=gpus))
    assert sample is not None
    assert (sample.pod, sample.host, sample.looks) == ("pod-0", "127.0.0.2", 1)
    assert (sample.rss_gib, sample.gpus) == ((2.4691, 2.4691, 2.4691), tuple(gpus))
    assert (sample.gpu_gib, sample.gpu_percent) == ((0.0, 0.0, 0.0), 80.0)
    assert sampler.sample(report()) is None
    other = sampler.sample(report(Pod(name="pod-1", address="127.0.0.3")))
    assert other is not None and other.gpus == () and other.gpu_gib is None
    hand.now += 4.9
    assert sampler.sample(report()) is None
    hand.now += 0.1
    assert sampler.sample(report()) is not None


def test_the_cores_in_use_are_the_cpu_time_between_two_samples(hand: Hand) -> None:
    sampler = Sampler(hand)
    cores = []
    for cpu_s in (3.0, 10.5, 1.0, 1.0):
        sample = sampler.sample(report(cpu_s=cpu_s))
        assert sample is not None
        assert Sample.read(json.loads(sample.to_line())) == sample
        cores.append(sample.cpu_cores)
        hand.now += 10.0
    assert cores == [None, 1.5, None, 0.0], "a restart begins with less CPU time"


def test_a_gpu_that_does_not_answer_is_named_once_and_again_when_it_answers(hand: Hand) -> None:
    sampler = Sampler(hand)
    well, lost = {"index": 0, "used_gib": 1.0}, {"index": 1, "error": 15}
    told = [
        event.data["message"]
        for gpus in ([well, lost], [well, lost], [well, {"index": 1, "used_gib": 2.0}], [well])
        for event in sampler.lost_gpus(report(gpus=gpus))
    ]
    names = ("GPU 1 of pod-0", "15")
    assert says(told[0], "look at nvidia-smi and the kernel's log on the pod's machine", *names)
    assert says(told[1], "answers its driver again", "GPU 1 of pod-0")
    assert len(told) == 2
    sample = sampler.sample(report(gpus=[well, lost]))
    assert sample is not None and sample.gpus == (well,)


def test_a_gpu_that_is_lost_again_and_again_has_few_notes(hand: Hand) -> None:
    sampler = Sampler(hand)
    told = [
        str(event.data["message"])
        for gpu in [{"index": 1, "error": 15}, {"index": 1, "used_gib": 2.0}] * 50
        for event in sampler.lost_gpus(report(gpus=[gpu]))
    ]
    assert len(told) == 6
    assert says(told[4], "Further losses of {} are not noted", "GPU 1 of pod-0")


def test_after_an_hour_samples_are_rarer(hand: Hand) -> None:
    sampler = Sampler(hand)
    hand.now += 3599.0
    assert sampler.sample(report()) is not None
    hand.now += 5.0
    assert sampler.sample(report()) is not None
    hand.now += 29.0
    assert sampler.sample(report()) is None
    hand.now += 1.0
    assert sampler.sample(report()) is not None


def test_pods_without_running_ranks_or_without_an_answer_have_no_sample(hand: Hand) -> None:
    sampler = Sampler(hand)
    assert sampler.sample(report(phase="exited")) is None
    assert sampler.sample(report(gib=0.0)) is None
    assert sampler.sample(report(answered=False)) is None
    assert sampler.sample(report()) is not None


def test_an_error_of_a_gpu_is_noted_once() -> None:
    sampler = Sampler()
    notes = []
    for xid in (79.0, 79.0, 31.0, 79.0):
        looked = report(gpus=[{"index": 3, "percent": 1.0, "xid": xid}, {"index": 4}])
        notes += [event.text("message") for event in sampler.lost_gpus(looked)]
    assert len(notes) == 2
    assert says(notes[0], "the driver reports Xid {} for {}", 79, "GPU 3 of pod-0")
