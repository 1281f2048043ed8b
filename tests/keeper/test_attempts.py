"""Whatever happens to ranks, pods and keepers: each event once and in order, and no log sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings

from tests.fakes.runloop import Fate, SimLink, SimPod, SimQueue, SimRank, Simulation, SimWatch
from tests.keeper.test_keeper_deaths import KILLED, checked, live, ways_to_live
from tests.support.examplefolder import example_folder
from workbench.base.process import rank_log
from workbench.keeper.link.context import RunContext
from workbench.keeper.watch.pod import PodReport
from workbench.rundir.events import MARK, Event, EventKind, read_events
from workbench.rundir.output.collect import Collector

PERIOD_S = 0.7
"""Time between two lines of a rank."""


def output_of(rank: SimRank, restart: int, now: float) -> bytes:
    """Return all that a rank has printed, text and events."""
    if rank.phase == "waiting":
        return b""
    until = rank.ended_at if rank.phase == "exited" else now
    lines = []
    for number in range(int((until - rank.started_at) / PERIOD_S)):
        data = {"n": number, "of": restart}
        event = Event(time_s=1.0 + number, rank=rank.rank, kind="told", data=data)
        lines.append(f"line {number}\r\n{MARK}{event.to_json()}\n")
    return "".join(lines).encode()


class Watch(SimWatch):
    """A watch that copies the output of the ranks as `PodWatch` does."""

    def __init__(self, link: SimLink, context: RunContext, reports: SimQueue) -> None:
        super().__init__(link, context, reports)
        self._collector = Collector(
            context.paths, context.ranks_on(link), attempt=context.restart, states=()
        )

    def look(self) -> PodReport:
        report = super().look()
        if not report.answered:
            return report
        chunks = {}
        for rank in self._pod.ranks.values():
            name = rank_log(self._pod.restart, rank.rank, "stdout")
            begin = self._collector.offsets.get(name, 0)
            data = output_of(rank, self._pod.restart, self._sim.now)[begin:]
            chunks[name] = {"offset": begin, "data": data.decode()}
        return replace(report, events=self._collector.take(chunks))


class Link(SimLink):
    """A line to a pod that records all that is sent."""

    def put(self, data: bytes, suffix: str = "") -> str:
        self.sim.sent.append((suffix, len(data)))  # type: ignore[attr-defined]
        return super().put(data, suffix)

    def put_file(self, source: Path, target: str) -> None:
        self.sim.sent.append((target, source.stat().st_size))  # type: ignore[attr-defined]
        super().put_file(source, target)

    def write(self, data: bytes, path: str) -> None:
        self.sim.sent.append((path, len(data)))  # type: ignore[attr-defined]
        super().write(data, path)


class Talkative(Simulation):
    """Pods whose ranks print."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sent: list[tuple[str, int]] = []
        """Names and sizes of all that was sent to pods."""
        super().__init__(*args, **options)

    def watch(self, link: SimLink, context: RunContext, reports: SimQueue) -> SimWatch:
        return Watch(link, context, reports)

    def link(self, pod: SimPod) -> SimLink:
        return Link(pod)


def check_record(sim: Talkative, state: str) -> None:
    """Compare the record of the run with what the ranks printed and the pods were sent."""
    events = list(read_events(sim.paths.events))
    restarts = sum(event.kind == EventKind.RESTARTED for event in events)
    attempts = [event.attempt or 0 for event in events]
    assert attempts == sorted(attempts), "an attempt is over before the next"
    for restart in range(restarts + 1):
        for rank in range(len(sim.pods)):
            told = [e for e in events if (e.attempt, e.output) == (restart, rank)]
            assert [e.data["n"] for e in told] == list(range(len(told))), "each once, in order"
            assert {e.data["of"] for e in told} <= {restart}
            path = sim.paths.rank_log(restart, rank, "stdout")
            log = path.read_bytes() if path.exists() else b""
            lines = log.split(b"\n")
            assert sum(line.startswith(MARK.encode()) for line in lines) == len(told)
            for event in told:
                assert log[event.offset :].startswith(MARK.encode())
    if state == "succeeded":
        for pod in sim.pods:
            for simulated in pod.ranks.values():
                log = sim.paths.rank_log(restarts, simulated.rank, "stdout").read_bytes()
                assert log == output_of(simulated, restarts, sim.now)
    archive = sim.paths.script.stat().st_size
    assert {name.rpartition("/")[2] for name, _ in sim.sent} <= {".zip", "stop"}
    assert {size for name, size in sim.sent if name == ".zip"} <= {archive}
    assert {size for name, size in sim.sent if name != ".zip"} <= {0}


LOST = [[Fate(4.0), replace(KILLED, after_s=3.0)], [Fate(4.0), Fate(6.0)]]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(restarts=1, fates=LOST, dies={"after line restarted": 1}, acts=[])
@example(restarts=1, fates=LOST, dies={"after line staged": 2, "before start": 2}, acts=[])
@example(restarts=2, fates=LOST, dies={"before event": 1}, acts=[(9.0, "vanish", 0)])
@given(**ways_to_live("vanish", "lose_agent", "cancel"))
def test_the_record_has_each_event_once_and_in_order_and_no_log_is_sent(**life: Any) -> None:
    with example_folder() as folder:
        sim, state = live(Talkative, folder, **life)
        checked(sim, state)
        check_record(sim, state)
