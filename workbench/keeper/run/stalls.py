"""Detect stalled runs, name the suspect ranks, save all stacks, and end the run if requested."""

from __future__ import annotations

import logging
import re
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.base.clock import Clock
from workbench.base.files import read_json, write_text
from workbench.jobs.launcher import Launcher
from workbench.keeper.awake import uptime_clock
from workbench.keeper.boundary import isolate_pod_errors
from workbench.keeper.launch import LauncherProcess
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.flight import flight_words, flights
from workbench.rundir.outcome import RankStatus
from workbench.rundir.paths import FLIGHT
from workbench.rundir.result import RunFault

_LEAST_S = 30.0
# A launcher and its ranks load libraries first.
_LEAST_UNSTARTED_S = 60.0
# Time for a launcher to start its first rank.
_UNSTARTED_S = 300.0
# Multiple of the median time between two reports of steps.
_STEPS = 5
_KEPT = 200
# Share of a core. Housekeeping uses less.
_IDLE_SHARE = 0.03
_IDLE_SLACK_S = 0.2
_IN_A_COLLECTIVE = re.compile(
    r"torch/distributed/|torch/autograd/|deepspeed/comm|multiprocessing/(connection|synchronize)"
    # Over NCCL a rank waits where it reads the result, and not in torch's own call.
    r"|workbench/agent/rank/collectives"
)
_FRAMES = 8
logger = logging.getLogger(__name__)
_FRAME = re.compile(r'File "(?:[^"\n]{0,4000}/)?([^"/\n]{1,255})", line (\d{1,9}) in (\S{1,255})')
_BUILD_LOCK = "file_baton.py"  # torch waits there for another process to build an op
_WRITTEN_S = 1.0
# Number of ranks in a remark. The file has all ranks.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Stall:
    seconds: float
    what: str
    """Description of the missing progress."""
    suspects: Sequence[RankStatus] = ()
    """Ranks that may delay the others. All running ranks if no difference is visible."""
    others: Sequence[RankStatus] = ()
    """Other running ranks, all with recent CPU use."""
    halted: bool = False
    """Whether the suspects are stopped by a signal."""


@dataclass(slots=True)
class StallWatch:
    """Record the last activity of the ranks.

    CPU time proves nothing during training: a rank waiting for a peer on a GPU spins.
    """

    clock: Clock = time.monotonic
    _busy: dict[int, tuple[float, float]] = field(default_factory=dict)
    _halted: dict[int, float] = field(default_factory=dict)
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _step: Event | None = None
    _told_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._told_at = self.clock()

    def begin(self) -> None:
        self._told_at = self.clock()

    def record(self, report: PodReport) -> None:
        if not report.answered:
            return
        now = self.clock()
        if not report.drained:
            self._told_at = now
        for rank in report.ranks:
            is_running = rank.phase == "running"
            since, used_s = self._busy.get(rank.rank, (now, -1.0))
            idle_cpu_s = _IDLE_SLACK_S + _IDLE_SHARE * (now - since)
            if not is_running or rank.cpu_s - used_s > idle_cpu_s:
                self._busy[rank.rank] = now, rank.cpu_s
            if is_running and rank.halted:
                self._halted.setdefault(rank.rank, now)
            else:
                self._halted.pop(rank.rank, None)

    def record_event(self, event: Event) -> None:
        self._told_at = self.clock()
        if event.kind != EventKind.STEP:
            return
        if self._step is not None:
            gap_s = event.time_s - self._step.time_s
            if gap_s > 0:
                self._gaps.append(gap_s)
        self._step = event

    @property
    def patience_s(self) -> float:
        """Time without progress, in seconds, before a run counts as stalled."""
        if not self._gaps:
            return _LEAST_S
        return max(_LEAST_S, _STEPS * statistics.median(self._gaps))

    def stall(
        self,
        ranks: Mapping[int, RankStatus],
        *,
        training: bool,
        least_s: float | None = None,
    ) -> Stall | None:
        """Return the current stall of the run, or None. `least_s` shortens the patience."""
        now = self.clock()
        patience_s = self.patience_s
        if least_s is not None:
            patience_s = min(patience_s, least_s)
        running = [rank for rank in ranks.values() if rank.phase == "running"]
        silent_s = now - self._told_at
        halted = [rank for rank in running if rank.rank in self._halted]
        if halted:
            first_halted = min(self._halted[rank.rank] for rank in halted)
            return Stall(now - first_halted, self._last_step(), halted, halted=True)
        if silent_s < patience_s:
            return None
        if not running:
            if ranks and all(rank.phase == "exited" for rank in ranks.values()):
                return None
            if least_s is None and silent_s < _LEAST_UNSTARTED_S:
                return None
            return Stall(silent_s, f"no rank has started for {silent_s:.0f} s")
        idle = [rank for rank in running if now - self._busy[rank.rank][0] >= patience_s]
        others = [rank for rank in running if rank not in idle]
        if training:
            what = f"no step for {silent_s:.0f} s{self._last_step(', ')}"
            if not idle:
                return Stall(silent_s, what, running)
            return Stall(silent_s, what, idle, others)
        if not idle:
            return None
        what = f"no output and no CPU for {silent_s:.0f} s{self._last_step(', ')}"
        return Stall(silent_s, what, idle, others)

    def _last_step(self, before: str = "") -> str:
        if self._step is None:
            return ""
        step = self._step.whole("step")
        return "" if step is None else f"{before}the last step was {step}"


def culprits(stall: Stall, stacks: Mapping[int, str]) -> Sequence[RankStatus]:
    """Return the ranks whose stacks are outside collectives. Empty if no rank stands out.

    A rank alone waits for no other rank, so its own place is the culprit.
    """
    waiting = set()
    for number, stack in stacks.items():
        if _IN_A_COLLECTIVE.search(innermost(stack)):
            waiting.add(number)
    apart = [rank for rank in stall.suspects if rank.rank not in waiting]
    if not apart:
        apart = [rank for rank in stall.others if rank.rank not in waiting]
    alone = len(apart) == len(stacks) == 1
    return apart if alone or len(apart) < len(stacks) else ()


def innermost(stack: str) -> str:
    # faulthandler writes the thread running Python code last, and its innermost frame first.
    current = stack.rpartition("Current thread")[2] or stack.rpartition("Thread 0x")[2]
    return "\n".join(current.splitlines()[1 : 1 + _FRAMES])


class StallGuard:
    def __init__(self, context: RunContext, clock: Clock = uptime_clock):
        self.watch = StallWatch(clock=clock)
        self.remark = ""
        """Message for the user. Empty while the run makes progress."""
        self._context = context
        self._clock = clock
        self._limit_s = context.spec.job.stall_timeout_s
        self._stacks: Mapping[int, str] = {}
        self._asked_for: set[int] = set()
        self._flight: list[str] = []
        self._launcher_halted_at: float | None = None

    def check(self, ledger: RunLedger, launcher: LauncherProcess | None) -> RunFault | None:
        """Check the run for a stall. Return the fault that ends the run, or None."""
        stall = self._launcher_stall(ledger, launcher)
        if stall is None:
            stall = self.watch.stall(ledger.ranks, training=ledger.in_steps, least_s=self._limit_s)
        if stall is None:
            self.remark = ""
            self._stacks = {}
            self._asked_for = set()
            self._flight = []
            return None
        suspects = {rank.rank for rank in stall.suspects}
        # A rank that was computing at the last request may have stopped elsewhere since.
        has_new_suspects = not ledger.in_steps and not suspects <= self._asked_for
        if ledger.started and (not self._stacks or has_new_suspects):
            self._stacks = self._keep_stacks(ledger.ranks)
            self._asked_for = self._asked_for | suspects
            self._flight = self._keep_flight()
        blamed = stall.suspects if stall.halted else culprits(stall, self._stacks)
        parts = [stall.what]
        parts += [self._words(rank) for rank in blamed[:_NAMED]]
        parts += self._flight[:_NAMED]
        if self._stacks:
            name = self._context.paths.stacks.name
            parts.append(f"{name} in logs/ has the stacks of all ranks")
        self.remark = "; ".join(part for part in parts if part)
        if self._limit_s is None:
            is_late = not ledger.started and stall.seconds >= _UNSTARTED_S
            if is_late and launcher is not None:
                return self._never_started(launcher)
            return None
        computing = not ledger.in_steps and any(rank in stall.others for rank in blamed)
        limit_s = self._limit_s
        # The agents import torch and DeepSpeed first, which takes a busy pod minutes.
        if launcher is None and not ledger.started:
            limit_s = max(limit_s, _UNSTARTED_S)
        if stall.seconds < limit_s or computing:
            return None
        return self._fault(blamed[0] if blamed else None)

    def _launcher_stall(self, ledger: RunLedger, launcher: LauncherProcess | None) -> Stall | None:
        if launcher is None or ledger.started or not launcher.halted:
            self._launcher_halted_at = None
            return None
        if not self._launcher_halted_at:
            self._launcher_halted_at = self._clock()
        name = self._context.spec.job.launcher
        what = f"no rank has started: the launcher {name} is stopped by a signal (SIGSTOP)"
        seconds = self._clock() - self._launcher_halted_at
        return Stall(seconds, what)

    def _never_started(self, launcher: LauncherProcess) -> RunFault:
        name = self._context.spec.job.launcher
        message = f"{self.remark}; the launcher {name} was ended."
        if name == Launcher.OPENMPI.value:
            # mpirun waits forever for a daemon that cannot connect back.
            message += (
                " mpirun's daemons on the pods must connect back "
                "to this machine; a firewall or a NetworkPolicy"
            )
            message += " may forbid that."
        return RunFault(
            kind="launcher",
            message=f"{message} Use launcher 'ssh'",
            traceback=launcher.tail(),
        )

    def _words(self, rank: RankStatus) -> str:
        where = f"rank {rank.rank} on {rank.pod.name}"
        if rank.halted:
            return f"{where} is stopped by a signal (SIGSTOP)"
        stack = self._stacks.get(rank.rank, "")
        at = _FRAME.search(innermost(stack))
        if at is None:
            return f"{where} gives no position"
        words = f"{where} is at {at[1]}:{at[2]} in {at[3]}"
        if at[1] == _BUILD_LOCK:
            words += ", for the build lock of an op; its log names the lock and the way out"
        return words

    def _keep_stacks(self, ranks: Mapping[int, RankStatus]) -> Mapping[int, str]:
        stacks = self._context.stacks(lenient=True)
        lines: list[str] = []
        for number, text in sorted(stacks.items()):
            status = ranks.get(number)
            pod = ""
            silent = "the stack gives no position"
            if status is not None:
                pod = f" on {status.pod.name}"
                if status.halted:
                    silent = "stopped by a signal"
            stack = self._context.redact(text) or silent
            lines.append(f"rank {number}{pod}\n{stack}\n")
        try:
            write_text(self._context.paths.stacks, "\n".join(lines))
        except OSError as error:
            logger.warning("cannot keep the stacks: %s", error)
        return stacks

    def _keep_flight(self) -> list[str]:
        """Fetch the last collectives of every rank, written a moment after its stacks."""
        context = self._context
        if not context.spec.job.traits.records_flight:
            return []
        time.sleep(_WRITTEN_S)

        def fetch(link: AgentLink) -> None:
            for rank in context.ranks_on(link):
                remote = context.on_pod(link).rank(rank) / FLIGHT
                # A stopped rank writes nothing.
                with isolate_pod_errors(link.pod.name, f"copying the flight record of rank {rank}"):
                    link.get(str(remote), context.paths.flight(rank))

        context.everywhere(fetch)
        dumps = {}
        for rank, path in flights(context.paths):
            dumps[rank] = read_json(path)
        return flight_words(dumps)

    def _fault(self, rank: RankStatus | None) -> RunFault:
        message = f"{self.remark}; ended as stall_timeout_s={self._limit_s:g} asks"
        if rank is None:
            return RunFault(kind="stall", message=message)
        stack = self._stacks.get(rank.rank, "")
        return RunFault(
            kind="stall",
            message=message,
            rank=rank.rank,
            pod=rank.pod.name,
            host=rank.pod.address,
            traceback=self._context.redact(stack),
        )
