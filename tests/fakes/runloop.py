"""Pods of a run without processes or network: their acts are scripted, and so is the clock.

A `Simulation` has pods, a clock and acts. The run loop drives it:
whoever asks its queue for a report moves the clock to the next thing
that happens. `runner` gives the real `Runner` that it is all for.
"""

from __future__ import annotations

import math
import queue
import shutil
import threading
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tests.support.runstores import empty
from workbench.base.clock import now_s
from workbench.base.errors import RemoteError
from workbench.base.files import read_json, write_json
from workbench.base.redact import Redactor
from workbench.finetune.job.finetune import Job
from workbench.keeper.decisions import DecisionLog
from workbench.keeper.launch import LaunchCommand
from workbench.keeper.link.agent import AgentLink, PodGone, stop_ranks
from workbench.keeper.link.context import RunContext
from workbench.keeper.recovery import inherited_runs
from workbench.keeper.run.attempt import AttemptDeps
from workbench.keeper.run.runner import Runner
from workbench.keeper.watch.pod import PodReport
from workbench.pods.pod import Phase, Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.events import Event
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import RankError, RankStatus
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.status import ClusterStatus, result_file

LEASE_S = 30.0
BEGIN_S = 1000.0
"""What the clock says at the beginning."""
RUN = "20261121-140252-sim-6c8c"
PORT = 29500
"""That of the n-th attempt is n higher."""
_POLL_S = 0.15
_OBEYS_S = 0.2  # for a rank to end once it is asked
_LIMIT_S = 4000.0  # no schedule of these tests takes as long


class KeeperDied(BaseException):
    """The keeper was killed; no boundary of the run loop may hide that."""


class EndlessError(BaseException):
    """The run does not end; no boundary of the run loop may hide that."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a rank once it has started."""

    after_s: float = math.inf
    """When it ends; never by itself if infinite."""
    error: RankError | None = None
    """Why it fails; None where it ends well."""
    code: int = 0
    stubborn: bool = False
    """Whether it has to be killed when it is asked to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One attempt: the fates of its ranks, and what rank 0 prints."""

    fates: Mapping[int, Fate] = field(default_factory=dict)
    others: Fate = Fate(5.0)
    """The fate of each rank that `fates` does not name."""
    prints: Sequence[tuple[float, str, Mapping[str, object]]] = ()
    """Seconds after the start, kind of event and data."""
    launcher_code: int | None = None
    """The launcher's end, two seconds after the start; None where it ends after its ranks."""


@dataclass(slots=True)
class SimRank:
    rank: int
    fate: Fate
    phase: str = "waiting"
    started_at: float = 0.0
    ended_at: float = 0.0
    code: int | None = None
    error: RankError | None = None
    stopped: bool = False
    forced: bool = False
    asked: str = ""

    @property
    def done(self) -> bool:
        return self.phase == "exited" and self.code == 0 and not self.error and not self.stopped

    def end(self, at: float, code: int, **how: Any) -> None:
        self.phase, self.ended_at, self.code = "exited", at, code
        for name, value in how.items():
            setattr(self, name, value)


class SimPod:
    """A pod, its agent and its ranks."""

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim = sim
        self.number = number
        self.agent_pid = 100 + number
        self.begin_anew()

    def begin_anew(self) -> None:
        """Be a new pod of this name, with an agent of its own and no ranks."""
        number = self.number
        self.agent_pid += 1000
        self.pod = Pod(
            name=f"pod-{number}",
            address=f"10.0.0.{number}",
            phase=Phase.RUNNING,
            host_key="ssh-ed25519 AAAA",
            root=f"/pods/pod-{number}",
            python="/usr/bin/python3",
        )
        self.mood = "answers"  # or silent, or gone
        self.silent_since = 0.0
        self.ranks: dict[int, SimRank] = {}
        self.printed = ""
        self.stop_at: tuple[float, float, bool] | None = None
        self.cleared = self.ended_with_agent = False
        self.attempt = self.restart = 0

    def silence(self) -> None:
        if self.mood == "answers":
            self.mood, self.silent_since = "silent", self.sim.now

    def answer(self) -> None:
        if self.mood == "silent":
            self.mood = "answers"

    def vanish(self) -> None:
        self.mood = "gone"
        self.pod = replace(self.pod, phase=Phase.FAILED, message="evicted")
        self._end_all(self.sim.now)

    def lose_agent(self) -> None:
        if self.mood != "gone":
            self._end_all(self.sim.now)
            self.ranks.clear()
            self.agent_pid += 1000

    @property
    def running(self) -> list[SimRank]:
        return [rank for rank in self.ranks.values() if rank.phase == "running"]

    @property
    def tells_of_its_end(self) -> bool:
        """Whether the agent answers that all of the pod's ranks are done."""
        is_heard = self.mood == "answers" and bool(self.ranks)
        return is_heard and all(rank.done for rank in self.ranks.values())

    def start(self) -> None:
        for rank in self.ranks.values():
            if rank.phase == "waiting":
                rank.phase, rank.started_at = "running", self.sim.now

    def stop(self, grace_s: float, *, ask: bool) -> None:
        if not ask:
            for rank in self.ranks.values():
                if rank.phase == "waiting":
                    rank.end(self.sim.now, -15, stopped=True)
        if self.stop_at is None or not ask:
            self.stop_at = self.sim.now, grace_s, ask

    def finish_early(self) -> None:
        """Do as a trainer that found the file by which it is asked to stop."""
        for rank in self.running:
            rank.fate = Fate(self.sim.now - rank.started_at + 1.0)

    def live(self, now: float) -> None:
        """Let what is due by now happen to the ranks."""
        for rank in self.running:
            ends = rank.started_at + rank.fate.after_s
            if self.stop_at is not None:
                asked_at, grace_s, ask = self.stop_at
                kills = rank.fate.stubborn
                if (obeys := asked_at + (grace_s if kills else _OBEYS_S)) <= min(now, ends):
                    by = "SIGTERM" if ask else ""
                    rank.end(obeys, -9 if kills else -15, stopped=True, forced=kills, asked=by)
                    continue
            if ends <= now:
                rank.end(ends, rank.fate.code, error=rank.fate.error)
        if self.mood == "silent" and now - self.silent_since >= self.sim.lease_s:
            self._end_all(self.silent_since + self.sim.lease_s)

    def _end_all(self, at: float) -> None:
        for rank in self.ranks.values():
            if rank.phase != "exited":
                self.ended_with_agent = True
                rank.end(at, -15, stopped=True)


class Simulation:
    """Pods, a clock, acts at times, and all that was asked of the agents."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        plans: Sequence[Plan] = (Plan(),),
        *,
        pods: int = 2,
        template: Path | None = None,
        replaces: bool = True,
    ) -> None:
        self.now, self.lease_s = BEGIN_S, LEASE_S
        self.wall = now_s() - self.now
        self.job, self.plans = job, plans
        self.pods = [SimPod(self, number) for number in range(pods)]
        self.asked: list[tuple[str, str]] = []
        """Pod and operation, in order."""
        self.replaces = replaces
        self.attempts = 0
        """How often an attempt was prepared."""
        self.attempt = 0
        """The number of the attempt that was prepared last."""
        self.trained: list[int] = []
        """The numbers of the attempts whose ranks were started, in order."""
        self.dies_at: dict[str, int] = {}
        """Places where the keeper dies, and at which time of passing them."""
        self.passed: list[str] = []
        """The places that keepers have passed, in order."""
        self.keeper = 1
        """The number of the keeper that lives."""
        self.launched_at = math.inf
        self.acts: list[tuple[float, Callable[[], object]]] = []
        self.on_op: dict[str, Callable[[], object]] = {}
        """Done once, before the agents first answer that operation."""
        self.wrong: list[str] = []
        """What must never be: each a sentence."""
        self._lock = threading.RLock()
        self._watches: list[SimWatch] = []
        self._printed = 0
        self._extra: list[tuple[float, str, Mapping[str, object]]] = []
        self._asked_by_file = False
        self._told_done: set[int] = set()
        self.unreadable = False
        """Whether what ranks left cannot be listed."""
        self.paths = RunPaths(folder / RUN)
        self._make(template)

    def _make(self, template: Path | None) -> None:
        if template is not None:
            shutil.copytree(template, self.paths.root)
        for made in (self.paths.inputs, self.paths.rank_log(0, 0, "stdout").parent):
            made.mkdir(parents=True, exist_ok=True)
        (self.paths.root.parent / "identity").mkdir(exist_ok=True)
        for rank in range(len(self.pods)):
            for stream in ("stdout", "stderr", "order"):
                self.paths.rank_log(0, rank, stream).touch()
        write_json(self.paths.info, {"id": RUN, "cluster": str(self.paths.root.parent)})
        write_json(self.paths.spec, self.spec.to_dict())
        if self.job.kind == "script":
            with zipfile.ZipFile(self.paths.script, "w") as archive:
                archive.writestr("train.py", "")

    @property
    def spec(self) -> RunSpec:
        return RunSpec(
            cluster=ClusterSpec(count=len(self.pods), lease_s=self.lease_s),
            job=self.job,
            pods=len(self.pods),
        )

    def context(self, *, inherited: bool = False) -> RunContext:
        context = RunContext(
            run_id=RUN,
            paths=self.paths,
            spec=self.spec,
            identity=Identity(self.paths.root.parent / "identity"),
            refresh=lambda: [pod.pod for pod in self.pods],
            restore=self.restore,
            spare=self.paths.root.parent / "spare" / "result.json",
            inherited=inherited,
        )
        return context.on([self.link(pod) for pod in self.pods])

    def link(self, pod: SimPod) -> SimLink:
        return SimLink(pod)

    def runner(self, *, inherited: bool = False) -> Runner:
        runner = Runner(self.context(inherited=inherited), self.around)
        runner.enqueue()
        return runner

    @property
    def around(self) -> AttemptDeps:
        return SimDeps(self)

    def watch(self, link: SimLink, context: RunContext, reports: SimQueue) -> SimWatch:
        return SimWatch(link, context, reports)

    @property
    def log_path(self) -> Path:
        return self.paths.root.parent / "store.db"

    def submitted(self) -> Runner:
        """Return the runner of a keeper that writes a log of decisions."""
        log = SimLog(self)
        empty(log, self.log_path)
        context = replace(self.context(), log=log, restore=self.restoring())
        runner = Runner(context, self.around)
        runner.enqueue()
        pods = [pod.pod.name for pod in self.pods]
        log.add(RUN, DecisionKind.SUBMITTED, path=self.paths.root, pods=pods)
        return runner

    def taken_over(self) -> tuple[dict[str, Runner], dict[str, Mapping[str, object]]]:
        """Have another keeper replay the log of the dead one; return runners and results."""
        self.keeper += 1
        self._watches.clear()
        log = SimLog(self)
        log.replay()
        fleet: Any = SimFleet(self)
        runners, ended = inherited_runs(fleet, Redactor(), ClusterStatus(), log, self.around)
        for runner in runners.values():
            if not runner.over:
                runner.enqueue()
        return runners, ended

    def live_through(self, runner: Runner, most: int = 20) -> str:
        """Carry the run out, over as many keepers as it takes; return the final state."""
        for _ in range(most):
            try:
                return str(runner.run())
            except KeeperDied:
                pass
            while True:
                try:
                    runners, ended = self.taken_over()
                    break
                except KeeperDied:
                    continue
            if RUN in ended:
                return str(ended[RUN]["state"])
            runner = runners[RUN]
            if runner.over:
                return str(read_json(result_file(self.paths))["state"])
        raise EndlessError(f"{most} keepers have died: {self.passed[-5:]}")

    def passes(self, place: str, keeper: int) -> None:
        """Kill the keeper if it is to die at this place. A dead keeper gets no further."""
        with self._lock:
            if keeper != self.keeper:
                raise KeeperDied(place)
            self.passed.append(place)
            left = self.dies_at.get(place, 0)
            if not left:
                return
            self.dies_at[place] = left - 1
            if left == 1:
                self.keeper += 1
                raise KeeperDied(place)

    def at(self, after_s: float, act: Callable[[], object]) -> None:
        """Have an act done so many seconds after the beginning."""
        self.acts.append((BEGIN_S + after_s, act))
        self.acts.sort(key=lambda each: each[0])

    def tick(self, until: float) -> None:
        """Move the clock, and let all happen that is due; several threads may."""
        while True:
            with self._lock:
                due = bool(self.acts) and self.acts[0][0] <= until
                at, act = self.acts.pop(0) if due else (until, None)
                self._move(at)
                if self.now > BEGIN_S + _LIMIT_S:
                    raise EndlessError(f"no end after {_LIMIT_S:.0f} s: {self.asked[-5:]}")
            if act is None:
                return
            act()  # without the lock: it may ask agents from threads of its own

    def _move(self, to: float) -> None:
        self.now = max(self.now, to)
        for pod in self.pods:
            pod.live(self.now)

    def is_due(self, of: SimQueue) -> bool:
        """Return whether a pod was looked at while the keeper was held up."""
        return any(w.reports is of and w.next_at <= self.now for w in self._watches)

    def next_report(self, of: SimQueue, timeout_s: float) -> PodReport:
        """Return the report that comes next, if one comes in that time."""
        deadline = self.now + timeout_s
        watches = [watch for watch in self._watches if watch.reports is of]
        first = min(watches, key=lambda watch: watch.next_at, default=None)
        if first is None or first.next_at > deadline:
            self.tick(deadline)
            raise queue.Empty
        self.tick(first.next_at)
        return first.look()

    def watched_by(self, watch: SimWatch, *, on: bool) -> None:
        if on:
            self._watches.append(watch)
        elif watch in self._watches:
            self._watches.remove(watch)

    @property
    def plan(self) -> Plan:
        """What the present attempt is to do; the last plan is that of all later attempts."""
        return self.plans[min(max(self.attempt, 1), len(self.plans)) - 1]

    def begin_attempt(self) -> int:
        """Count an attempt, which asks for a port once; return the port."""
        with self._lock:
            if len(self._told_done) == len(self.pods):
                self.wrong.append("the run was trained again after all ranks were done")
            if all(pod.tells_of_its_end for pod in self.pods):
                self.wrong.append("the run was trained again, and the pods know that it is done")
            self.attempts += 1
            self._told_done, self._extra = set(), []
            self._printed, self.launched_at = 0, math.inf
            return PORT + self.attempts

    def prepared(self, pod: SimPod, request: Mapping[str, Any]) -> None:
        with self._lock:
            pod.attempt = request.get("attempt", 0)
            pod.restart = request.get("restart", 0)
            self.attempt = pod.attempt or self.attempts
            ranks = [raw["rank"] for raw in request["ranks"] if raw["pod"] == pod.pod.name]
            fates = {rank: self.plan.fates.get(rank, self.plan.others) for rank in ranks}
            if pod.running:
                self.wrong.append(f"{pod.pod.name} was given ranks while others of the run lived")
            pod.ranks = {rank: SimRank(rank, fate) for rank, fate in fates.items()}
            pod.stop_at, pod.cleared, pod.ended_with_agent = None, False, False

    def started(self, pod: SimPod) -> None:
        with self._lock:
            if self.paths.result.exists():
                self.wrong.append("ranks were started after the result")
            if pod.attempt not in self.trained[-1:] and pod.attempt:
                if pod.attempt in self.trained:
                    self.wrong.append(f"attempt {pod.attempt} was started twice")
                self.trained.append(pod.attempt)
            self.launched_at = min(self.launched_at, self.now)
            pod.start()
            if self._asked_by_file:
                self._finish_early()

    def ask_by_file(self) -> None:
        """Take the file by which a trainer is asked to stop."""
        with self._lock:
            self._asked_by_file = True
            self._finish_early()

    def _finish_early(self) -> None:
        if self.launched_at < math.inf and not self._extra:
            self._extra.append((self.now - self.launched_at + 0.5, "stopped", {"step": 3}))
        for pod in self.pods:
            pod.finish_early()

    def told(self, ranks: Sequence[RankStatus]) -> None:
        """Note which ranks the run loop knows to be done."""
        self._told_done |= {rank.rank for rank in ranks if rank.done}

    def launch(self, _command: LaunchCommand, _run: str, log: Path) -> SimLauncher:
        log.write_text("launcher: what it said last\n")
        for pod in self.pods:
            # A pod that the run goes on without has ranks of an earlier attempt at most.
            is_prepared = any(rank.phase == "waiting" for rank in pod.ranks.values())
            if pod.mood == "answers" and is_prepared:
                self.started(pod)
        return SimLauncher(self)

    def restoring(self) -> Callable[[Collection[str]], Mapping[str, str]]:
        """Return the function with which the living keeper replaces pods."""
        keeper = self.keeper

        def restore(lost: Collection[str]) -> Mapping[str, str]:
            self.passes("before restore", keeper)
            left = self.restore(lost)
            self.passes("after restore", keeper)
            return left

        return restore

    def restore(self, lost: Collection[str]) -> Mapping[str, str]:
        if not self.replaces:
            return dict.fromkeys(lost, "no other pod is to be had")
        with self._lock:
            for pod in self.pods:
                # The agent of a pod that answers is started again there.
                if pod.pod.name in lost and pod.mood != "answers":
                    pod.begin_anew()
        return {}

    def printed(self) -> list[Event]:
        """Return the events that rank 0 has printed since the last look."""
        with self._lock:
            since = self.now - self.launched_at
            due = [each for each in [*self.plan.prints, *self._extra] if each[0] <= since]
            fresh, self._printed = due[self._printed :], max(self._printed, len(due))
            return [
                Event(time_s=self.wall + self.launched_at + after_s, rank=0, kind=kind, data=data)
                for after_s, kind, data in fresh
            ]

    def asked_of(self, pod: str) -> list[str]:
        return [op for name, op in self.asked if name == pod]

    def note(self, pod: str, op: str) -> None:
        with self._lock:
            self.asked.append((pod, op))
            act = self.on_op.pop(op, None)
        if act is not None:
            act()


class SimLog(DecisionLog):
    """The log of decisions, with a place before and after each line."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim.log_path)
        self._sim, self._keeper = sim, sim.keeper

    def add(self, run: str, what: DecisionKind, attempt: int = 0, **facts: object) -> None:
        self._sim.passes(f"before line {what}", self._keeper)
        super().add(run, what, attempt, **facts)
        self._sim.passes(f"after line {what}", self._keeper)


class SimDeps(AttemptDeps):
    def __init__(self, sim: Simulation) -> None:
        self._sim = sim

    def clock(self) -> float:
        return self._sim.now

    def reports(self) -> SimQueue:
        return SimQueue(self._sim)

    def watch(self, link: Any, context: RunContext, reports: Any) -> Any:
        return self._sim.watch(link, context, reports)

    def together(self, watches: Any) -> Any:
        return SimWatches(watches)

    def launch(self, command: LaunchCommand, run_id: str, log: Path) -> Any:
        return self._sim.launch(command, run_id, log)

    def journal(self, *args: Any) -> SimJournal:
        return SimJournal(self._sim, *args)


class SimJournal(Journal):
    """The journal of a run, with a place before and after restarts and the result."""

    def __init__(self, sim: Simulation, *args: Any) -> None:
        super().__init__(*args)
        self._sim, self._keeper = sim, sim.keeper

    def event(self, event: Event) -> Event | None:
        if event.kind == "restarted":
            self._sim.passes("before event", self._keeper)
        recorded = super().event(event)
        if event.kind == "restarted":
            self._sim.passes("after event", self._keeper)
        return recorded

    def finish(self, *args: Any, **facts: Any) -> None:
        self._sim.passes("before result", self._keeper)
        super().finish(*args, **facts)
        self._sim.passes("after result", self._keeper)


class SimFleet:
    """The pods, as a keeper that takes over has them."""

    def __init__(self, sim: Simulation) -> None:
        self._links = [sim.link(pod) for pod in sim.pods]
        self.paths = ClusterPaths(sim.paths.root.parent)
        self.spec = sim.spec.cluster
        self.identity = Identity(sim.paths.root.parent / "identity")
        self.restore = sim.restoring()
        self._sim = sim

    def refresh(self) -> Sequence[Pod]:
        return [pod.pod for pod in self._sim.pods]

    def named(self, names: Collection[str]) -> list[SimLink]:
        return [link for link in self._links if link.pod.name in names]

    def at(self, addresses: Collection[str]) -> list[SimLink]:
        return [link for link in self._links if link.pod.address in addresses]

    def stop_ranks(self, run_id: str) -> None:
        stop_ranks(self._links, run_id)


class SimQueue(queue.Queue[PodReport]):
    """The queue of reports: to wait for one moves the clock."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__()
        self._sim = sim

    def get(self, block: bool = True, timeout: float | None = None) -> PodReport:
        assert block and timeout is not None, "a wait without an end"
        return self._sim.next_report(self, timeout)

    def empty(self) -> bool:
        return not self._sim.is_due(self)


class SimLauncher:
    """A launcher that ends after the ranks, or two seconds after their start by itself."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._ended = sim, False
        self.halted = False

    @property
    def exit_code(self) -> int | None:
        code = self._sim.plan.launcher_code
        if code is not None and self._sim.now >= self._sim.launched_at + 2.0:
            return code
        lives = any(pod.running for pod in self._sim.pods)
        return None if lives and not self._ended else 0

    def tail(self) -> str:
        return "what it said last"

    def end(self) -> None:
        self._ended = True


class SimWatch:
    """Looks at one pod as `PodWatch` does, whenever the clock comes to it."""

    def __init__(self, link: SimLink, context: RunContext, reports: SimQueue) -> None:
        self.reports = reports
        self._sim, self._pod, self._context = link.sim, link.of, context
        self._link, self._agent_pid = link, link.of.agent_pid
        self._heard = self.next_at = link.sim.now

    def start(self) -> None:
        self._sim.watched_by(self, on=True)

    def close(self) -> None:
        self._sim.watched_by(self, on=False)

    def look(self) -> PodReport:
        pod, sim = self._pod, self._sim
        self.next_at = sim.now + _POLL_S
        if pod.mood == "gone":
            return self._lose(f"{pod.pod.name} is Failed: evicted")
        if pod.mood == "silent":
            self.next_at = sim.now + 0.5
            silent_s = sim.now - self._heard
            if silent_s >= sim.lease_s:
                return self._lose(f"no sign from {pod.pod.name} for {silent_s:.0f} s")
            return PodReport(pod=pod.pod, answered=False)
        if pod.agent_pid != self._agent_pid:
            return self._lose(
                f"lost the agent of {pod.pod.name}: the agent was "
                "killed; the ranks on the pod died with the agent"
            )
        self._heard = sim.now
        ranks = [self._status(rank) for rank in pod.ranks.values()]
        sim.told(ranks)
        return PodReport(
            pod=pod.pod,
            ranks=ranks,
            events=sim.printed() if 0 in pod.ranks else (),
            live_processes=len(pod.running),
            drained=True,
        )

    def _status(self, rank: SimRank) -> RankStatus:
        ended = rank.phase == "exited"
        error = rank.error
        if error is not None:
            error = replace(error, time_s=self._sim.wall + rank.ended_at)
        return RankStatus(
            rank=rank.rank,
            pod=self._pod.pod,
            phase=rank.phase,
            exit_code=rank.code,
            done=rank.done,
            stopped=rank.stopped,
            asked=rank.asked,
            forced=rank.forced,
            ended_s=self._sim.wall + rank.ended_at if ended else None,
            error=error,
            cpu_s=self._sim.now if rank.phase == "running" else 0.0,
        )

    def _lose(self, why: str) -> PodReport:
        self.close()
        return PodReport(pod=self._pod.pod, answered=False, lost=why)


class SimWatches:
    """The watches of a run's pods."""

    def __init__(self, watches: Sequence[SimWatch]) -> None:
        self._watches = watches

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


class SimLink(AgentLink):
    """The keeper's line to a simulated pod: it answers at once, or not at all."""

    def __init__(self, of: SimPod) -> None:
        self.of, self.sim, self.pod = of, of.sim, of.pod
        self.keeper = of.sim.keeper
        self.package, self.interface, self.shared = "/package/0", "lo", ()
        self.cores = 0.0
        self.clock_offset_s = 0.0
        self.agent_replaced = ""
        self._retries = False
        self.store = PurePosixPath("/store")

    @property
    def agent_pid(self) -> int:  # type: ignore[override]
        return self.of.agent_pid

    @property
    def transfer(self) -> None:
        return None

    def open(self) -> None:
        self._reach()

    def close(self) -> None: ...

    def _reach(self) -> None:
        if self.of.mood != "answers":
            raise RemoteError(f"lost the line to {self.pod.name}", host=self.pod.address)

    def call(self, op: str, timeout_s: float = 8.0, **fields: Any) -> dict[str, Any]:
        self.sim.passes(f"before {op}", self.keeper)
        self.sim.note(self.pod.name, op)
        self._reach()
        answer = self._answer(op, fields)
        self.sim.passes(f"after {op}", self.keeper)
        return answer

    def _answer(self, op: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        if op == "free_port":
            answer = {"port": self.sim.begin_attempt()}
        elif op == "prepare":
            self.sim.prepared(self.of, fields["request"])
        elif op == "prepared":
            answer = {"mine": fields["rank"] in self.of.ranks}
        elif op == "start":
            if not self.of.ranks:
                why = f"{self.pod.name}: run {RUN} is not prepared on {self.pod.name}"
                raise RemoteError(why, host=self.pod.address)
            self.sim.started(self.of)
        elif op == "stop":
            self.of.stop(fields["grace_s"], ask=bool(fields.get("ask")))
        elif op == "rejoin":
            phases = [rank.phase for rank in self.of.ranks.values()]
            answer = {
                "phases": phases,
                "inherited": self.of.ended_with_agent,
                "attempt": self.of.attempt,
                "restart": self.of.restart,
            }
        elif op == "poll":
            self.sim.tick(self.sim.now + _POLL_S)
            answer = {"live_processes": len(self.of.running)}
        elif op == "stacks":
            answer = {"stacks": {}}
        return answer

    def work(self, op: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        self.sim.passes(f"before {op}", self.keeper)
        self.sim.note(self.pod.name, op)
        self._reach()
        if op == "list_outputs" and self.sim.unreadable:
            raise RemoteError(f"{self.pod.name}: out/ cannot be read", host=self.pod.address)
        return {}

    def run(self, argv: Sequence[str], timeout_s: float = 60.0, *, again: bool = False) -> str:
        self.sim.passes(f"before {argv[0]}", self.keeper)
        self._reach()
        if list(argv[:2]) == ["rm", "-rf"] and argv[-1].endswith(RUN):
            self.of.cleared = True
            self.of.ranks.clear()
        self.sim.passes(f"after {argv[0]}", self.keeper)
        return ""

    def put(self, data: bytes, suffix: str = "") -> str:
        self.retry_until_lease(lambda _: self._reach())
        return f"/store/{len(data)}{suffix}"

    def put_once(self, local: Path, digest: str) -> str:
        self.retry_until_lease(lambda _: self._reach())
        return f"/store/{digest}"

    def put_file(self, source: Path, target: str) -> None:
        self._reach()

    def write(self, data: bytes, path: str) -> None:
        self.sim.note(self.pod.name, f"write {PurePosixPath(path).name}")
        self._reach()
        self.sim.ask_by_file()

    def size(self, remote: str) -> int:
        return 0

    def sees(self, path: Path) -> bool:
        return False

    def retry_until_lease(
        self, action: Callable[[Any], Any], *, unwanted: Callable[[], bool] = lambda: False
    ) -> Any:
        if self._retries:
            return action(None)
        self._retries = True
        try:
            return self._retry(action, unwanted)
        finally:
            self._retries = False

    def _retry(self, action: Callable[[Any], Any], unwanted: Callable[[], bool]) -> Any:
        until = self.sim.now + self.sim.lease_s
        while True:
            try:
                return action(None)
            except RemoteError as error:
                if self.of.mood == "answers" or unwanted():
                    raise
                if self.of.mood == "gone":
                    raise PodGone(
                        f"{self.pod.name} is Failed: evicted", host=self.pod.address
                    ) from error
                if self.sim.now > until:
                    why = f"no sign from {self.pod.name} for {self.sim.lease_s:.0f} s: {error}"
                    raise PodGone(why, host=self.pod.address) from error
            self.sim.tick(self.sim.now + 0.5)
