"""One attempt at a run: prepare the pods, start the ranks, follow them, and leave nothing of them running."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from workbench.base.clock import now_s
from workbench.base.errors import RemoteError, RunError, WorkbenchError
from workbench.base.files import write_text
from workbench.base.files.disk import full_disk_named
from workbench.jobs.launcher import Launcher
from workbench.keeper.awake import awake
from workbench.keeper.launch import LaunchCommand, LauncherProcess, build_command
from workbench.keeper.link.agent import AgentLink, PodGone
from workbench.keeper.link.context import RunContext, Wishes
from workbench.keeper.link.files import TransferProgress
from workbench.keeper.run.restart import ranks_left
from workbench.keeper.run.stage import (
    check_hostfile,
    launch_plan,
    rank_request,
    resumed_from,
    send_inputs,
)
from workbench.keeper.run.stalls import StallGuard
from workbench.keeper.run.verdict import fault_of, lost_pod, place_words, stopped_by_others
from workbench.keeper.watch.ledger import RunLedger
from workbench.keeper.watch.pod import PodReport, PodWatch, Sampler
from workbench.rundir.journal import Journal
from workbench.rundir.outcome import MemoryPeaks, first_cause, only_echoes
from workbench.rundir.output.collect import mask_file
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_GRACE_S = 3.0  # between asking ranks to end and killing them
_SETTLE_S = (
    1.0  # after the first failure, for the error records of the rank that really failed first
)
_PATIENCE_S = 15.0  # for a pod that does not answer, when others failed because of something on it
_LAUNCHER_S = 2.0  # for ranks to end after their launcher did
_UNANSWERED_S = 1.0  # a pod that answers does so several times a second
_SWEEP_S = 15.0
_GIVEN_UP_S = (
    12.0  # a pod that has been silent for so long is not waited for when ranks are stopped
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What an attempt takes the time from, hears its pods by and starts a launcher by; a test gives its own."""

    clock: Callable[[], float] = awake
    """Seconds, without those in which this machine slept."""
    reports: Callable[[], queue.Queue[PodReport]] = queue.Queue
    """Makes the queue that the watches put their reports into."""
    watch: Callable[[AgentLink, RunContext, queue.Queue[PodReport]], PodWatch] = PodWatch
    launch: Callable[[LaunchCommand, str, Path], LauncherProcess] = LauncherProcess.start


class Attempt:
    """Start the ranks of a run once and see them to their end."""

    def __init__(
        self,
        context: RunContext,
        journal: Journal,
        peaks: MemoryPeaks,
        wishes: Wishes,
        *,
        rejoin: bool = False,
        around: Surroundings | None = None,
    ):
        self._around = around or Surroundings()
        self._clock = self._around.clock
        names = [link.pod.name for link in context.links]
        self.ledger = RunLedger(pods=names, world_size=len(context.places), clock=self._clock)
        self.command: LaunchCommand | None = None
        """What starts its ranks; None before `prepare`, and where a keeper that died started them."""
        self.master_port = 0
        """Port of torch's rendezvous; 0 before `prepare`."""
        self._context = context
        self._journal = journal
        self._peaks = peaks
        self._wishes = wishes
        self._reports = self._around.reports()
        self._launcher: LauncherProcess | None = None
        self._sampler = Sampler()
        self._unasked: dict[str, tuple[float, bool]] = {}
        """Pods that could not be asked to end ranks yet, with the grace and whether they are only to be asked."""
        self._stalls = StallGuard(context, self._clock)
        self.begun = self._prepared = False
        self._rejoins = rejoin
        self._gone: PodGone | None = None  # a pod that was lost before the ranks were found again
        self._unwatched = (
            False  # whether ranks ended with their agent, before a new keeper was there
        )

    @property
    def left_processes(self) -> int | None:
        """Processes of it that are still alive; None where a pod does not answer."""
        return self.ledger.left_processes if self.begun else 0

    def run(self) -> RunFault | None:
        """Do all of it; blocks until nothing of it is left on any pod that answers."""
        fault: RunFault | None = None
        watches: list[PodWatch] = []
        try:
            if not (self._rejoins and self._rejoin()):
                self._send()
                if self._unwanted:
                    return None
                self.begun = True
                watches = self._watch()
                self._launch()
            else:
                watches = self._watch()
            fault = self._follow()
        except RemoteError as error:
            logger.warning("run %s: %s", self._context.run_id, error)
            fault = None if self._unwanted else fault_of(self._context, error)
        except Exception as error:  # thread boundary: any failure is a failed run with a result
            logger.exception("run %s", self._context.run_id)
            fault = RunFault(kind=type(error).__name__, message=str(error))
        if watches:
            self._end_ranks()
        for watch in watches:
            watch.close()
        self._prepared = False
        return fault

    def _send(self) -> None:
        c = self._context
        check_hostfile(c)
        resumed = resumed_from(c.paths)
        what = (
            f"inputs and the checkpoint of step {resumed.step}"
            if resumed
            else c.spec.job.travels(c.paths.root)
        )
        notes = resumed.notes if resumed else ()
        self._journal.state(RunState.STARTING, "; ".join([f"sending {what} to the pods", *notes]))
        with TransferProgress(c.links, self._journal.hint, ""), full_disk_named(c.paths.root):
            self.prepare()

    def _rejoin(self) -> bool:
        self._journal.hint("another keeper takes over from one that died, and looks for the ranks")
        try:
            left = ranks_left(self._context)
        except PodGone as error:
            # Ranks on the other pods may live: they are watched, and ended as after any loss of a pod.
            self._gone = error
            self.begun = self._prepared = True
            return True
        if left is None:
            return False
        self._launcher, self._unwatched = left
        self.begun = self._prepared = True
        if self._wishes.stop.is_set():
            self.stop()
        return True

    def prepare(self) -> None:
        """Send the inputs and the request to every pod and make the launch command; nothing starts."""
        c = self._context
        c.everywhere(partial(self._lasting, AgentLink.ensure))
        address = c.links[0].pod.address
        self.master_port = self._lasting(
            lambda link: int(link.call("free_port", address=address)["port"]), c.links[0]
        )

        def one(link: AgentLink) -> None:
            send_inputs(c, link)
            link.call(
                "prepare", run=c.run_id, request=rank_request(c, link, (address, self.master_port))
            )

        def again(link: AgentLink) -> None:
            rank = c.ranks_on(link)[0]
            if not link.call("prepared", run=c.run_id, rank=rank)[
                "mine"
            ]:  # its agent is another one by now
                one(link)

        for step in (one, again):
            c.everywhere(partial(self._lasting, step))
        self.command = build_command(launch_plan(c, self.master_port))
        write_text(c.paths.command, f"{self.command}\n")
        self._prepared = True
        if self._wishes.stop.is_set():
            self.stop()

    def _lasting(self, action: Callable[[AgentLink], _T], link: AgentLink) -> _T:
        return link.lasting(lambda _: action(link), unwanted=self._wishes.cancel.is_set)

    @property
    def _unwanted(self) -> bool:
        """Whether it is to end, and nothing more of it is to start: of ranks that stop by a signal, a stop too."""
        by_signal = self._context.spec.job.stop.by == "signal"
        return self._wishes.cancel.is_set() or (by_signal and self._wishes.stop.is_set())

    def stop(self) -> None:
        """Pass the wish to stop on, by a file or by a signal as the job says. Idempotent."""
        how = self._context.spec.job.stop
        if how.by == "file" and self._prepared:
            first = self._context.links[0]
            first.write(b"", str(self._context.on_pod(first).stop))
        elif how.by == "signal" and self.begun:
            self.ledger.asked_s = self.ledger.asked_s or now_s()
            ask = partial(self._stop, grace_s=how.grace_s or _GRACE_S, ask=True)
            self._context.everywhere(ask)

    def stacks(self) -> dict[int, str]:
        if not self.begun:
            raise RunError("its ranks have not been started yet")
        return self._context.stacks()

    def _watch(self) -> list[PodWatch]:
        watches = [
            self._around.watch(link, self._context, self._reports) for link in self._context.links
        ]
        for watch in watches:
            watch.start()
        return watches

    def _launch(self) -> None:
        check_hostfile(self._context)
        self._journal.state(RunState.STARTING, "starting ranks")
        self._stalls.watch.begin()
        if self._context.spec.job.launcher == Launcher.SSH:
            run_id = self._context.run_id
            self._context.everywhere(
                partial(self._lasting, lambda link: link.call("start", run=run_id))
            )
        else:
            c = self._context
            # mpirun passes lines on in pieces and mixes those of ranks: a secret in them could not be told any more.
            command = build_command(launch_plan(c, self.master_port, quiet=True))
            self._launcher = self._around.launch(command, c.run_id, c.paths.launcher_log)

    def _follow(self) -> RunFault | None:
        if self._gone is not None:
            gone = fault_of(self._context, self._gone)
            self.ledger.lost[gone.pod] = gone.message
            return gone
        while True:
            self._take()
            self._ask_again()
            if first_cause(self.ledger.ranks.values()) is not None:
                self._settle()
                return self._blame()
            if self._wishes.cancel.is_set():
                return None
            if self.ledger.lost:
                return lost_pod(self._context, self.ledger)
            if self.ledger.over:
                if self.ledger.all_done or self._unwanted:
                    return None
                return stopped_by_others(self.ledger, self._context, unwatched=self._unwatched)
            if (fault := self._launcher_fault()) is not None:
                return fault
            if (fault := self._stalls.look(self.ledger, self._launcher)) is not None:
                return fault
            place = partial(place_words, self._context)
            remark = self.ledger.remark(
                self._stalls.remark, stopping=self._stopping, slept=awake.slept(), place=place
            )
            self._journal.hint(remark)

    @property
    def _stopping(self) -> str:
        if not self._wishes.stop.is_set():
            return ""
        how = self._context.spec.job.stop
        if how.by == "signal":
            grace_s = how.grace_s or _GRACE_S
            return f"asked to stop, and killed if it has not ended {grace_s:g} s later"
        return "stopping after a checkpoint"

    def _take(self, timeout_s: float = 0.2) -> None:
        try:
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return
        for note in report.notes:
            logger.warning("%s", note)
        started = self.ledger.started
        self.ledger.see(report)
        self._stalls.watch.see(report)
        # Of ranks that may not send state events, the start of their processes is all that is known.
        if self.ledger.started and not started and not self._context.spec.job.events:
            self._journal.state(RunState.RUNNING, "running")
        self._peaks.see(report.ranks)
        if (sample := self._sampler.see(report)) is not None:
            self._journal.event(sample)
        for event in report.events:
            self._journal.event(event)
            self._peaks.see_event(event, report.pod.address)
            self._stalls.watch.see_event(event)
            if (news := self.ledger.totals.take(event)) is not None:
                self._journal.state(*news)

    def _settle(self) -> None:
        # Longer while it may be a pod that does not answer.
        c, began = self._context, self._clock()
        # A run that may go on waits until the pod counts as lost: its peers ended at once, its lease has not.
        patience_s = _PATIENCE_S + (
            c.spec.cluster.lease_s if c.spec.job.restarts > c.restart else 0.0
        )
        while (waited_s := self._clock() - began) < _SETTLE_S or (
            waited_s < patience_s and self._unexplained()
        ):
            self._take(timeout_s=0.05)
            if self._wishes.cancel.is_set():
                return

    def _unexplained(self) -> bool:
        silent = bool(self.ledger.silent(_UNANSWERED_S)) and not self.ledger.lost
        return silent and only_echoes(self.ledger.ranks.values())

    def _blame(self) -> RunFault | None:
        ranks = self.ledger.ranks.values()
        if self._unwatched and only_echoes(ranks):
            return stopped_by_others(self.ledger, self._context, unwatched=True)
        if self.ledger.lost and only_echoes(ranks):
            return lost_pod(self._context, self.ledger)
        return first_cause(ranks)

    def _launcher_fault(self) -> RunFault | None:
        if self._launcher is None or (code := self._launcher.exit_code) is None:
            return None
        began = self._clock()
        while (waited_s := self._clock() - began) < _LAUNCHER_S or (
            waited_s < _PATIENCE_S and self.ledger.silent(_UNANSWERED_S)
        ):
            self._take(timeout_s=0.1)
            if (
                first_cause(self.ledger.ranks.values())
                or self.ledger.lost
                or self.ledger.all_exited
            ):
                return None
        name = self._context.spec.job.launcher
        how = (
            f"was killed by signal {-code}"
            if code < 0
            else f"ended with {code} before its ranks did"
        )
        return RunFault(
            kind="launcher", message=f"the launcher {name} {how}", traceback=self._launcher.tail()
        )

    def _end_ranks(self) -> None:
        if not self.ledger.over or self.ledger.lost:
            self._journal.hint("stopping ranks")
            self._context.everywhere(self._stop)
        if self._launcher is not None:
            self._launcher.end()
            try:
                mask_file(self._context.paths.launcher_log, self._context.redact)
            except OSError as error:  # a disk that takes no byte now took none before
                logger.warning("cannot mask %s: %s", self._context.paths.launcher_log, error)
        deadline = self._clock() + _SWEEP_S
        while self._clock() < deadline and not self.ledger.gone_from(
            self.ledger.answering(_GIVEN_UP_S)
        ):
            self._take(timeout_s=0.1)
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
        """Ask pods that answer again to end ranks, where they could not be asked; return whether one was."""
        answering = self.ledger.answering(_UNANSWERED_S) if self._unasked else []
        late = [link for link in self._context.links if link.pod.name in answering]
        late = [link for link in late if link.pod.name in self._unasked]
        for link in late:
            grace_s, ask = self._unasked[link.pod.name]
            self._stop(link, grace_s, ask=ask)
        return bool(late)
