"""Notice that a run stands still, and which rank holds it up: from steps, output and CPU time of its ranks."""

from __future__ import annotations

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.keeper.watch.pod import PodReport
from workbench.rundir.events import Event, EventKind
from workbench.rundir.outcome import RankStatus

_LEAST_S = 30.0
_STEPS = 5  # times the median time between two reports of steps
_KEPT = 200
_IDLE_SHARE = 0.03  # of a core: less is housekeeping
_IDLE_SLACK_S = 0.2
_IN_A_COLLECTIVE = re.compile(
    r"torch/distributed/|torch/autograd/|deepspeed/comm|multiprocessing/(connection|synchronize)"
)
_FRAMES = 8


@dataclass(frozen=True, slots=True)
class Stall:
    seconds: float
    what: str
    """What has not happened, in words."""
    suspects: Sequence[RankStatus] = ()
    """Ranks that may hold the others up; all that run where nothing tells them apart."""
    others: Sequence[RankStatus] = ()
    """The other ranks that run: they use CPU."""
    halted: bool = False
    """Whether the suspects are stopped by a signal."""


@dataclass(slots=True)
class StallWatch:
    """What the ranks last did. While they train, CPU time tells nothing: who waits for a peer on a GPU spins."""

    clock: Callable[[], float] = time.monotonic
    _busy: dict[int, tuple[float, float]] = field(default_factory=dict)
    _halted: dict[int, float] = field(default_factory=dict)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _step: Event | None = None
    _told_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._told_at = self.clock()

    def begin(self) -> None:
        self._told_at = self.clock()

    def see(self, report: PodReport) -> None:
        if not report.answered:
            return
        now = self.clock()
        if not report.drained:
            self._told_at = now
        for rank in report.ranks:
            since, used_s = self._busy.get(rank.rank, (now, -1.0))
            if rank.cpu_s - used_s > _IDLE_SLACK_S + _IDLE_SHARE * (now - since) or rank.phase != "running":
                self._busy[rank.rank] = now, rank.cpu_s
            if rank.halted and rank.phase == "running":
                self._halted.setdefault(rank.rank, now)
            else:
                self._halted.pop(rank.rank, None)

    def see_event(self, event: Event) -> None:
        self._told_at = self.clock()
        if event.kind == EventKind.STEP:
            if self._step is not None and event.time_s > self._step.time_s:
                self._gaps.append(event.time_s - self._step.time_s)
            self._step = event

    @property
    def patience_s(self) -> float:
        """For how long nothing need happen before it is a stall."""
        return max(_LEAST_S, _STEPS * statistics.median(self._gaps) if self._gaps else 0.0)

    def stall(self, ranks: Mapping[int, RankStatus], *, training: bool, least_s: float | None = None) -> Stall | None:
        """Return the stall that the run is in; `least_s` shortens the patience."""
        now = self.clock()
        patience_s = self.patience_s if least_s is None else min(self.patience_s, least_s)
        running = [rank for rank in ranks.values() if rank.phase == "running"]
        silent_s = now - self._told_at
        if halted := [rank for rank in running if rank.rank in self._halted]:
            seconds = now - min(self._halted[rank.rank] for rank in halted)
            return Stall(seconds, self._last_step(), halted, halted=True)
        if silent_s < patience_s:
            return None
        if not running:
            return (
                None
                if ranks and all(rank.phase == "exited" for rank in ranks.values())
                else Stall(silent_s, f"no rank has started for {silent_s:.0f} s")
            )
        idle = [rank for rank in running if now - self._busy[rank.rank][0] >= patience_s]
        others = [rank for rank in running if rank not in idle]
        if training:
            what = f"no step for {silent_s:.0f} s{self._last_step(', ')}"
            return Stall(silent_s, what, idle or running, others if idle else ())
        what = f"no output and no CPU for {silent_s:.0f} s{self._last_step(', ')}"
        return Stall(silent_s, what, idle, others) if idle else None

    def _last_step(self, before: str = "") -> str:
        step = self._step.whole("step") if self._step is not None else None
        return "" if step is None else f"{before}the last step was {step}"


def culprits(stall: Stall, stacks: Mapping[int, str]) -> Sequence[RankStatus]:
    """Return those that do not wait for others, by their stacks; none where nothing tells the ranks apart."""
    waiting = {rank for rank, stack in stacks.items() if _IN_A_COLLECTIVE.search(innermost(stack))}
    apart: list[RankStatus] = []
    for ranks in (stall.suspects, stall.others):
        apart = apart or [rank for rank in ranks if rank.rank not in waiting]
    return apart if len(apart) < len(stacks) else ()


def innermost(stack: str) -> str:
    # faulthandler writes the thread that runs Python code now last, and its innermost frame first.
    current = stack.rpartition("Current thread")[2] or stack.rpartition("Thread 0x")[2]
    return "\n".join(current.splitlines()[1 : 1 + _FRAMES])
