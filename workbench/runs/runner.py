"""One run from its start to its result: stage, launch, watch, judge, bring back.

It runs in a thread of the keeper. What it learns goes to the run directory at once; the result is written last and
its presence means that the run is over. How the judging works is in `outcome.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from workbench.errors import WorkbenchError
from workbench.pods.pod import Pod
from workbench.runs.agentlink import AgentLink
from workbench.runs.events import Event
from workbench.runs.journal import Journal
from workbench.runs.launch import LaunchCommand, LaunchPlan, RankPlace, build_command
from workbench.runs.launcher import LauncherProcess
from workbench.runs.outcome import MemoryPeaks, first_cause
from workbench.runs.paths import RunPaths
from workbench.runs.result import RunFault
from workbench.runs.sight import Sight
from workbench.runs.specfile import RunSpec
from workbench.runs.stage import clear, fetch, rank_request, send_inputs
from workbench.runs.state import RunState
from workbench.runs.watch import PodReport, PodWatch
from workbench.spec.technique import Launcher

__all__ = ["RunContext", "Runner"]

logger = logging.getLogger(__name__)
_GRACE_S = 3.0  # between asking ranks to end and killing them
_SETTLE_S = 1.0  # after the first failure, for the error records of the rank that really failed first
_SWEEP_S = 15.0
_SILENCE_SHOWN_S = 15.0
_STUCK_SHOWN_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What the keeper hands to a run."""

    run_id: str
    """Id of the run."""
    paths: RunPaths
    """Its directory."""
    spec: RunSpec
    """What was asked."""
    links: Sequence[AgentLink]
    """Open links to the pods of this run, in rank order."""
    places: Sequence[RankPlace]
    """All ranks."""
    plan: Callable[[int], LaunchPlan]
    """Gives the launch plan for a master port."""
    look: Callable[[], Sequence[Pod]]
    """Asks the backend for the pods as they are now."""
    lease_s: float = 120.0
    """The agents' lease."""


class Runner:
    """Carry one run through; `run` blocks until its result is on disk."""

    def __init__(self, context: RunContext):
        """Prepare; nothing starts yet."""
        self._context = context
        self._journal = Journal(context.paths)
        self._peaks = MemoryPeaks()
        self._sight = Sight(pods=[link.pod.name for link in context.links], world_size=len(context.places))
        self._reports: queue.Queue[PodReport] = queue.Queue()
        self._cancel = threading.Event()
        self._launcher: LauncherProcess | None = None
        self._command: LaunchCommand | None = None
        self._started_s = time.time()

    def cancel(self) -> None:
        """Ask the run to stop; it ends as cancelled. Idempotent."""
        self._cancel.set()

    def run(self) -> RunState:
        """Do all of it.

        Returns:
            How the run ended. No error leaves: what went wrong is in the result.
        """
        self._started_s = time.time()
        fault: RunFault | None = None
        watches: list[PodWatch] = []
        try:
            self._journal.state(RunState.STARTING, "sending inputs to the pods")
            self._prepare()
            watches = self._watch()
            self._launch()
            fault = self._follow()
        except Exception as error:  # the border of the run's thread: any failure is a failed run with a result
            logger.exception("run %s", self._context.run_id)
            fault = RunFault(kind=_kind(error), message=str(error))
        fault = self._end_ranks(fault)
        for watch in watches:
            watch.close()
        fault = self._bring_back(fault)
        return self._finish(fault)

    def dry(self) -> dict[str, object]:
        """Send the job to the pods and give the JSON form of the command that would start it; nothing starts."""
        self._prepare()
        assert self._command is not None
        return self._command.to_dict()

    def abandon(self, why: str) -> None:
        """End a run that never started as cancelled, with a result."""
        self._write_result(RunState.CANCELLED, why, None)

    def _prepare(self) -> None:
        c = self._context
        port = int(str(c.links[0].call("free_port", address=c.links[0].pod.address)["port"]))
        master = (c.links[0].pod.address, port)
        job, spec = c.spec.job, c.spec.cluster.pods

        def one(link: AgentLink) -> None:
            send_inputs(link, job, c.paths, c.run_id, spec.gpus)
            request = rank_request(run_id=c.run_id, job=job, spec=spec, link=link, places=c.places, master=master)
            link.call("prepare", run=c.run_id, request=request)

        self._everywhere(one)
        self._command = build_command(c.plan(port))
        c.paths.command.write_text(f"{self._command}\n", encoding="utf-8")

    def _watch(self) -> list[PodWatch]:
        c = self._context
        watches = []
        for link in c.links:
            ranks = [p.rank for p in c.places if p.pod == link.pod.name]
            watches.append(PodWatch(link, c.run_id, ranks, c.paths, self._reports, c.lease_s, c.look))
        for watch in watches:
            watch.start()
        return watches

    def _launch(self) -> None:
        self._journal.state(RunState.STARTING, "starting ranks")
        if self._context.spec.job.launcher == Launcher.SSH:
            self._everywhere(lambda link: link.call("start", run=self._context.run_id))
        elif self._command is not None:
            self._launcher = LauncherProcess(self._command, self._context.paths.launcher_log)

    def _follow(self) -> RunFault | None:
        """Take in reports until the ranks are over or something is wrong; give the fault."""
        while True:
            self._take()
            cause = first_cause(self._sight.ranks.values())
            if cause is not None:
                self._settle()
                return first_cause(self._sight.ranks.values())
            if self._cancel.is_set():
                return None
            if self._sight.lost:
                return self._lost_pod()
            if self._sight.over:
                return None
            if self._launcher is not None and (code := self._launcher.exit_code) is not None:
                fault = self._launcher_ended(code)
                if fault is not None:
                    return fault
            self._say_what_is_silent()

    def _take(self, timeout_s: float = 0.2) -> None:
        try:
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return
        for note in report.notes:
            logger.warning("%s", note)
        self._sight.see(report)
        self._peaks.see(report.ranks)
        for event in report.events:
            self._take_event(event, report.pod.address)

    def _take_event(self, event: Event, address: str) -> None:
        self._journal.event(event)
        self._peaks.see_event(event, address)
        if self._sight.see_event(event):
            self._journal.state(RunState.RUNNING, "training")
        elif event.kind == "phase" and event.rank == 0:
            state = RunState.RUNNING if self._sight.training else RunState.STARTING
            self._journal.state(state, str(event.data.get("name", "")))

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            self._take(timeout_s=0.05)

    def _say_what_is_silent(self) -> None:
        silent = self._sight.silent(_SILENCE_SHOWN_S)
        stuck_s = self._sight.stuck_s
        if silent:
            said = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in silent.items())
            self._journal.hint(f"no sign from {said}; training goes on there until its lease ends")
        elif stuck_s >= _STUCK_SHOWN_S:
            self._journal.hint(f"no step for {stuck_s:.0f} s")
        else:
            self._journal.hint("")

    def _lost_pod(self) -> RunFault:
        name, why = next(iter(self._sight.lost.items()))
        address = next(link.pod.address for link in self._context.links if link.pod.name == name)
        return RunFault(pod=name, host=address, kind="pod", message=why)

    def _launcher_ended(self, code: int) -> RunFault | None:
        """Judge a launcher that ended: fine once every rank ended too, a fault while ranks wait or run."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            self._take(timeout_s=0.1)
            if first_cause(self._sight.ranks.values()) or self._sight.all_exited:
                return None
        assert self._launcher is not None
        name = self._context.spec.job.launcher
        said = f"was killed by signal {-code}" if code < 0 else f"ended with {code} before its ranks did"
        return RunFault(kind="launcher", message=f"the launcher {name} {said}", traceback=self._launcher.tail())

    def _end_ranks(self, fault: RunFault | None) -> RunFault | None:
        """Stop what still runs on every pod and wait until nothing is left there."""
        c = self._context
        if not self._sight.over or self._sight.lost:
            self._journal.hint("stopping ranks")
            self._everywhere_quietly(lambda link: link.call("stop", run=c.run_id, grace_s=_GRACE_S))
        if self._launcher is not None:
            self._launcher.end()
        deadline = time.monotonic() + _SWEEP_S
        while time.monotonic() < deadline and not self._sight.gone:
            self._take(timeout_s=0.1)
        return fault

    def _bring_back(self, fault: RunFault | None) -> RunFault | None:
        c = self._context
        try:
            self._journal.hint("bringing results back")
            fetch(c.links[0], c.run_id, c.paths)
            if fault is None and self._sight.all_done:
                self._everywhere_quietly(lambda link: clear(link, c.run_id))
        except Exception as error:  # the run's own outcome must be written whatever happens to its files
            logger.exception("bringing back %s", c.run_id)
            missing = RunFault(kind=_kind(error), message=f"the results could not be brought back: {error}")
            return fault or missing
        return fault

    def _finish(self, fault: RunFault | None) -> RunState:
        state, message = self._verdict(fault)
        self._write_result(state, message, fault)
        return state

    def _write_result(self, state: RunState, message: str, fault: RunFault | None) -> None:
        self._journal.finish(
            state,
            message=message,
            fault=fault,
            context_facts={
                "command": str(self._command or ""),
                "started_s": self._started_s,
                "peak_memory_gib": self._peaks.gib,
                "memory_kind": self._peaks.kind,
                "left_processes": sum(self._sight.left.values()),
            },
            spec=self._context.spec,
            pods=[link.pod for link in self._context.links],
            world_size=len(self._context.places),
        )

    def _verdict(self, fault: RunFault | None) -> tuple[RunState, str]:
        if fault is not None:
            return RunState.FAILED, str(replace(fault, traceback="", others=""))
        if self._sight.all_done:
            return RunState.SUCCEEDED, "every rank is done"
        forced = self._sight.forced
        killed = f"; ranks {forced} did not end when asked and were killed" if forced else ""
        return RunState.CANCELLED, f"stopped when asked{killed}"

    def _everywhere(self, action: Callable[[AgentLink], object]) -> None:
        with ThreadPoolExecutor(max_workers=len(self._context.links)) as pool:
            list(pool.map(action, self._context.links))

    def _everywhere_quietly(self, action: Callable[[AgentLink], object]) -> None:
        def one(link: AgentLink) -> None:
            try:
                action(link)
            except WorkbenchError as error:
                logger.warning("%s", error)

        self._everywhere(one)


def _kind(error: Exception) -> str:
    return type(error).__name__
