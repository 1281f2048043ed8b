"""The parts of one attempt: prepare the pods, start the ranks, follow and finally stop them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from workbench.base.clock import now_s
from workbench.base.errors import RemoteError, WorkbenchError
from workbench.base.files import write_text
from workbench.base.files.disk import full_disk_named
from workbench.base.json_values import as_int
from workbench.base.redact import Redactor
from workbench.jobs.launcher import Launcher
from workbench.keeper.awake import uptime_clock
from workbench.keeper.launch import LaunchCommand, LauncherProcess, build_command
from workbench.keeper.link.agent import AgentLink, PodGone, stop_ranks
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.link.files import TransferProgress
from workbench.keeper.link.in_place import claim
from workbench.keeper.resource_limits import retry_on_exhaustion
from workbench.keeper.run.fetch import PodFetches
from workbench.keeper.run.packages import Packages, PackagesError
from workbench.keeper.run.policy import blame, stopped_by_others
from workbench.keeper.run.restart import InheritedRanks
from workbench.keeper.run.stage import (
    check_hostfile,
    launch_plan,
    rank_request,
    resumed_from,
    send_inputs,
    sent_inputs,
)
from workbench.keeper.run.stalls import StallGuard
from workbench.keeper.run.verdict import fault_of, lost_pod, place_words
from workbench.keeper.watch.ledger import SILENCE_SHOWN_S, RunLedger
from workbench.keeper.watch.pod import PodReport, PodWatch, RunWatch, Sampler, why_agent_lost
from workbench.rundir.events import Event, EventKind
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import MemoryPeaks, first_cause, only_echoes
from workbench.rundir.output.collect import mask_file
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
# Grace between asking ranks to end and killing them.
_GRACE_S = 3.0
# After the first failure, wait for the error record of the rank with the first error.
_SETTLE_S = 1.0
# Wait for a silent pod if the failures of other ranks may come from there.
_PATIENCE_S = 15.0
# Time for ranks to end after their launcher.
_LAUNCHER_S = 2.0
# A healthy pod answers several times a second.
_UNANSWERED_S = 1.0
_SWEEP_S = 15.0
# A pod with a longer silence is skipped when ranks are stopped.
_GIVEN_UP_S = 12.0
_LAST_PORT = 65535


class AttemptDeps:
    """Clock, report queue, watches and launcher of an attempt. Tests have their own class."""

    def clock(self) -> float:
        """Return seconds. The time in which this machine slept does not count."""
        return uptime_clock()

    def reports(self) -> queue.Queue[PodReport]:
        """Return the queue for the reports of the pod watches."""
        return queue.Queue()

    def watch(
        self, link: AgentLink, context: RunContext, reports: queue.Queue[PodReport]
    ) -> PodWatch:
        return PodWatch(link, context, reports)

    def together(self, watches: Sequence[PodWatch]) -> RunWatch:
        return RunWatch(watches)

    def launch(self, command: LaunchCommand, run_id: str, log: Path) -> LauncherProcess:
        return LauncherProcess.start(command, run_id, log)

    def journal(self, paths: RunPaths, redact: Redactor, spare: Path | None) -> Journal:
        return Journal(paths, redact, spare)


class Attempt:
    """One start of a run's ranks, until all have ended. The runner calls the parts in order."""

    def __init__(
        self,
        context: RunContext,
        journal: Journal,
        peaks: MemoryPeaks,
        requests: StopRequests,
        totals: RunTotals,
        around: AttemptDeps,
        found: InheritedRanks | None = None,
    ):
        """Follow the ranks of a run.

        Args:
            context: The run and its pods.
            journal: The run's state and events.
            peaks: The most memory so far.
            requests: Requests of users.
            totals: Sums over all attempts of the run.
            around: Clock, watches and launcher.
            found: Ranks that a dead keeper has started. None: `prepare` and `launch` come first.
        """
        self._around = around
        self._clock = self._around.clock
        names = [link.pod.name for link in context.links]
        self.ledger = RunLedger(
            pods=names, world_size=len(context.places), totals=totals, clock=self._clock
        )
        self.command: LaunchCommand | None = None
        """Command that starts the ranks. None before `prepare` and for ranks of a dead keeper."""
        self.master_port = 0
        """Port of torch's rendezvous; 0 before `prepare`."""
        self._context = context
        self._journal = journal
        self._peaks = peaks
        self._requests = requests
        self._reports = self._around.reports()
        self._found = found
        self._launcher = found.launcher if found is not None else None
        self._watch: RunWatch | None = None
        self._sampler = Sampler()
        self._unasked: dict[str, tuple[float, bool]] = {}
        """Pods that could not be asked to end ranks: grace in seconds, and whether only to ask."""
        self._stalls = StallGuard(context, self._clock)
        # Process ids of the agents with the prepared ranks, by pod.
        self._agents: dict[str, int] = {}

    @property
    def live_processes(self) -> int | None:
        """Number of processes of the run still alive. None: a pod does not answer."""
        return self.ledger.live_processes if self._watch is not None else 0

    def explain(self, error: Exception) -> RunFault | None:
        """Return the fault of an error in the attempt. None: the run was asked to end."""
        run_id = self._context.run_id
        if isinstance(error, PackagesError):
            logger.warning("run %s: %s", run_id, error)
            return error.fault
        if isinstance(error, RemoteError):
            logger.warning("run %s: %s", run_id, error)
            if self.is_unwanted:
                return None
            return self._lost_agent(error) or fault_of(self._context, error)
        logger.error("run %s", run_id, exc_info=error)
        return RunFault(kind=type(error).__name__, message=str(error))

    def end(self, fault: RunFault | None) -> RunFault | None:
        """End the ranks and return the fault of the attempt.

        Blocks until no process of the run is left on any reachable pod.
        """
        if self._watch is not None:
            self._end_ranks()
        elif self._context.inherited:
            # The ranks of the dead keeper may be alive, and no watch has begun.
            stop_ranks(self._context.links, self._context.run_id)
        if self._watch is not None:
            self._watch.close()
        # The last reports came after that of a pod's loss. A run that is done is not repeated.
        if self.ledger.lost and self.ledger.all_done:
            return None
        return fault

    def _lost_agent(self, error: RemoteError) -> RunFault | None:
        """Blame the end of an agent if another agent has answered. None: it is the same agent."""
        for link in self._context.links:
            name = link.pod.name
            # A new agent knows nothing of the run, so its words would hide the cause.
            agent = self._agents.get(name, link.agent_pid)
            if link.pod.address != error.host or agent == link.agent_pid:
                continue
            why = why_agent_lost(link, self._context.spec.cluster.lease_s)
            self.ledger.lost[name] = why
            return fault_of(self._context, PodGone(why, host=error.host))
        return None

    def stage(self) -> None:
        """Prepare all pods, unless the run is cancelled meanwhile. Starts no rank."""
        c = self._context
        retry_on_exhaustion(partial(check_hostfile, c), self._journal.hint)
        if not self.install():
            return
        resumed = retry_on_exhaustion(partial(resumed_from, c.paths), self._journal.hint)
        notes: Sequence[str] = ()
        if resumed:
            what = f"inputs and the checkpoint of step {resumed.step}"
            notes = resumed.notes
        else:
            what = sent_inputs(c.spec.job, c.paths)
        sending = "; ".join([f"sending {what} to the pods", *notes])
        self._journal.state(RunState.STARTING, sending)
        with TransferProgress(c.links, self._journal.hint, ""), full_disk_named(c.paths.root):
            # No rank has started, so the whole preparation can be repeated.
            retry_on_exhaustion(self.prepare, self._journal.hint)

    def install(self) -> bool:
        """Make the environment of the job on every pod, if the job asks for packages.

        Return False for a run that was cancelled meanwhile.
        """
        packages = Packages(self._context, self._journal, unwanted=lambda: self.is_unwanted)
        return packages.install()

    def prepare(self) -> None:
        """Send inputs and the request to every pod and build the launch command. Starts no rank."""
        c = self._context
        c.everywhere(partial(self._retry_until_lease, AgentLink.ensure))
        for link in c.links:
            link.common = None  # of an earlier run
        if c.shared is not None:
            claim(c.links, c.shared, c.paths)
        first = c.links[0]
        address = first.address

        def free_port(link: AgentLink) -> int:
            answer = link.call("free_port", address=address)
            port = as_int(answer.get("port"))
            if port is None or not 0 < port <= _LAST_PORT:
                raise RemoteError(
                    f"the agent of {link.pod.name} names no free port. "
                    "If the pod is trusted, start another cluster",
                    host=address,
                )
            return port

        self.master_port = self._retry_until_lease(free_port, first)

        folders = self._fetched()

        def one(link: AgentLink) -> None:
            send_inputs(c, link, folders.get(link.pod.name, ""))
            request = rank_request(c, link, (address, self.master_port))
            link.call("prepare", run=c.run_id, request=request)

        def again(link: AgentLink) -> None:
            rank = c.ranks_on(link)[0]
            answer = link.call("prepared", run=c.run_id, rank=rank)
            # The agent was replaced in the meantime.
            if answer.get("mine") is not True:
                one(link)
            self._agents[link.pod.name] = link.agent_pid

        for step in (one, again):
            c.everywhere(partial(self._retry_until_lease, step))
        for link in c.links:
            if link.unshared:
                self._note(link.unshared)
                link.unshared = ""
        plan = launch_plan(c, self.master_port)
        self.command = build_command(plan)
        try:
            write_text(c.paths.command, f"{self.command}\n")
        except OSError as error:  # People read the file. The result has the command as well.
            logger.warning("cannot write %s: %s", c.paths.command, error)

    def _fetched(self) -> Mapping[str, str]:
        """Return the folder on each pod with the files that a single pod fetched for all."""
        wanted = self._context.spec.job.fetch_for_pods() if len(self._context.links) > 1 else None
        if wanted is None:
            return {}
        fetches = PodFetches(self._context, wanted, self._note, unwanted=lambda: self.is_unwanted)
        fetches.run(self._retry_until_lease)
        return fetches.folders

    def _note(self, message: str) -> None:
        data = {"message": message}
        self._journal.event(Event(time_s=now_s(), rank=None, kind=EventKind.NOTE, data=data))

    def _retry_until_lease(self, action: Callable[[AgentLink], _T], link: AgentLink) -> _T:
        return link.retry_until_lease(lambda _: action(link), unwanted=self._requests.cancel.is_set)

    @property
    def is_unwanted(self) -> bool:
        """Whether the run must end without starting ranks: cancelled, or stopped by signal."""
        if self._requests.cancel.is_set():
            return True
        by_signal = self._context.spec.job.rules.stop.by == "signal"
        return by_signal and self._requests.stop.is_set()

    def stop(self) -> None:
        """Forward the stop request by file or signal, as the job asks. Idempotent."""
        how = self._context.spec.job.rules.stop
        if how.by == "file":
            first = self._context.links[0]
            first.write(b"", str(self._context.on_pod(first).stop))
        elif how.by == "signal":
            if not self.ledger.asked_s:
                self.ledger.asked_s = now_s()
            grace_s = how.grace_s or _GRACE_S
            self._context.everywhere(partial(self._stop, grace_s=grace_s, ask=True))

    def watch(self) -> None:
        """Start to watch all pods."""
        c = self._context
        self.ledger.begin()
        watches = []
        for link in c.links:
            # A watch opens the logs here.
            make = partial(self._around.watch, link, c, self._reports)
            watches.append(retry_on_exhaustion(make, self._journal.hint))
        together = partial(self._around.together, watches)
        watch = retry_on_exhaustion(together, self._journal.hint)
        watch.start()
        self._watch = watch

    def launch(self) -> None:
        """Start the ranks on the prepared pods, and watch them."""
        self.watch()
        c = self._context
        retry_on_exhaustion(partial(check_hostfile, c), self._journal.hint)
        self._journal.state(RunState.STARTING, "starting ranks")
        self._stalls.watch.begin()
        if c.spec.job.launcher == Launcher.SSH.value:

            def start(link: AgentLink) -> None:
                link.call("start", run=c.run_id)

            try:
                c.everywhere(partial(self._retry_until_lease, start))
            finally:
                # The call to a silent pod blocks for a lease. Reports of the other pods wait here.
                while not self._reports.empty():
                    self._record_next()
        else:
            # mpirun splits and mixes the lines of ranks, so secrets inside could not be masked.
            plan = launch_plan(c, self.master_port, quiet=True)
            command = build_command(plan)
            self._launcher = self._around.launch(command, c.run_id, c.paths.launcher_log)

    def follow(self) -> RunFault | None:
        """Record the reports of the pods until the ranks end or must be ended."""
        gone = self._found.gone if self._found is not None else None
        if gone is not None:
            lost = fault_of(self._context, gone)
            self.ledger.lost[lost.pod] = lost.message
            return lost
        unwatched = self._found is not None and self._found.unwatched
        rebooted = self._context.restarted
        while True:
            self._record_next()
            self._ask_again()
            if first_cause(self.ledger.ranks.values()) is not None:
                self._settle()
                fault = blame(self.ledger, unwatched=unwatched, rebooted=rebooted)
                return fault or lost_pod(self._context, self.ledger)
            if self._requests.cancel.is_set():
                return None
            if self.ledger.lost:
                return lost_pod(self._context, self.ledger)
            if self.ledger.over:
                if self.ledger.all_done or self.is_unwanted:
                    return None
                return stopped_by_others(self.ledger, unwatched=unwatched, rebooted=rebooted)
            fault = self._launcher_fault()
            if fault is None:
                fault = self._stalls.check(self.ledger, self._launcher)
            if fault is not None:
                return fault
            # The platform is asked about silent pods alone.
            is_silent = bool(self.ledger.silent(SILENCE_SHOWN_S))
            remark = self.ledger.remark(
                self._stalls.remark,
                stopping=self._stopping,
                slept=uptime_clock.slept(),
                place=place_words(self._context) if is_silent else "",
            )
            self._journal.hint(remark)

    @property
    def _stopping(self) -> str:
        if not self._requests.stop.is_set():
            return ""
        how = self._context.spec.job.rules.stop
        if how.by == "signal":
            grace_s = how.grace_s or _GRACE_S
            return f"asked to stop; the ranks still alive after {grace_s:g} s are killed"
        return "stopping after a checkpoint"

    def _record_next(self, timeout_s: float = 0.2) -> None:
        try:
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return
        for note in report.notes:
            logger.warning("%s", note)
        started = self.ledger.started
        self.ledger.record(report)
        self._stalls.watch.record(report)
        # If ranks send no state events, the start of their processes is the only sign.
        has_begun = self.ledger.started and not started
        if has_begun and not self._context.spec.job.traits.events:
            self._journal.state(RunState.RUNNING, "running")
        self._peaks.record(report.ranks)
        sample = self._sampler.sample(report)
        if sample is not None:
            self._journal.sample(sample)
        for silent in self._sampler.lost_gpus(report):
            recorded = self._journal.event(silent)
            if recorded is not None:
                self.ledger.totals.take(recorded)
        for printed in report.events:
            event = self._journal.event(printed)
            if event is None:  # recorded before; the local log was incomplete then
                continue
            self._peaks.record_event(event, report.pod.address)
            self._stalls.watch.record_event(event)
            news = self.ledger.totals.take(event)
            if news is not None:
                self._journal.state(*news)

    def _settle(self) -> None:
        c = self._context
        began = self._clock()
        patience_s = _PATIENCE_S
        # Peers of a lost pod fail at once, but the pod counts as lost only after its lease.
        if c.spec.job.restarts > c.restart:
            patience_s += c.spec.cluster.lease_s
        while True:
            waited_s = self._clock() - began
            if waited_s >= patience_s:
                return
            # Wait longer if a pod may be silent.
            if waited_s >= _SETTLE_S and not self._unexplained():
                return
            self._record_next(timeout_s=0.05)
            if self._requests.cancel.is_set():
                return

    def _unexplained(self) -> bool:
        silent = bool(self.ledger.silent(_UNANSWERED_S)) and not self.ledger.lost
        return silent and only_echoes(self.ledger.ranks.values())

    def _launcher_fault(self) -> RunFault | None:
        if self._launcher is None:
            return None
        code = self._launcher.exit_code
        if code is None:
            return None
        began = self._clock()
        while True:
            waited_s = self._clock() - began
            if waited_s >= _PATIENCE_S:
                break
            # Wait longer if a pod is silent.
            if waited_s >= _LAUNCHER_S and not self.ledger.silent(_UNANSWERED_S):
                break
            self._record_next(timeout_s=0.1)
            if first_cause(self.ledger.ranks.values()):
                return None
            if self.ledger.lost or self.ledger.all_exited:
                return None
        name = self._context.spec.job.launcher
        how = f"ended with {code} before the ranks did"
        if code < 0:
            how = f"was killed by signal {-code}"
        return RunFault(
            kind="launcher",
            message=f"the launcher {name} {how}",
            traceback=self._launcher.tail(),
        )

    def _end_ranks(self) -> None:
        if not self.ledger.over or self.ledger.lost:
            self._journal.hint("stopping ranks")
            self._context.everywhere(self._stop)
        if self._launcher is not None:
            self._launcher.end()
            try:
                c = self._context
                mask_file(c.paths.launcher_log, c.redact, c.paths.root)
            except OSError as error:  # The disk is full, and an earlier message says so.
                logger.warning("cannot mask %s: %s", self._context.paths.launcher_log, error)
        deadline = self._clock() + _SWEEP_S
        while self._clock() < deadline:
            answering = self.ledger.answering(_GIVEN_UP_S)
            if self.ledger.gone_from(answering):
                return
            self._record_next(timeout_s=0.1)
            if self._ask_again():
                deadline = self._clock() + _SWEEP_S

    def _stop(self, link: AgentLink, grace_s: float = _GRACE_S, *, ask: bool = False) -> None:
        name = link.pod.name
        if name in self.ledger.lost:
            return
        self._unasked[name] = grace_s, ask
        try:
            link.call("stop", run=self._context.run_id, grace_s=grace_s, ask=ask)
        except WorkbenchError as error:
            logger.warning("%s", error)
        else:
            self._unasked.pop(name, None)

    def _ask_again(self) -> bool:
        """Retry failed stop requests on pods that answer again. Return whether a pod was asked."""
        if not self._unasked:
            return False
        answering = self.ledger.answering(_UNANSWERED_S)
        is_asked = False
        for link in self._context.links:
            # The thread of a request may have asked the pod in the meantime.
            request = self._unasked.get(link.pod.name)
            if request is None or link.pod.name not in answering:
                continue
            grace_s, ask = request
            self._stop(link, grace_s, ask=ask)
            is_asked = True
        return is_asked
