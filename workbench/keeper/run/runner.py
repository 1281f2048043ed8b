"""Carry a run from start to result. The result is written last and marks the end of the run."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import PurePosixPath

from workbench.base.clock import now_s
from workbench.base.errors import PodError, RemoteError, RunError, WorkbenchError
from workbench.base.files import gate
from workbench.base.json_values import number, part
from workbench.keeper.boundary import isolate_run_errors
from workbench.keeper.checkpoints import (
    CheckpointCollector,
    PulledCheckpoints,
    bring_checkpoints_back,
)
from workbench.keeper.decisions import RunDecisions
from workbench.keeper.link.agent import AgentLink, stop_ranks
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.link.files import TransferProgress
from workbench.keeper.resource_limits import retry_on_exhaustion
from workbench.keeper.run.attempt import Attempt, AttemptDeps
from workbench.keeper.run.outputs import PulledOutputs, bring_back, clear, output_facts
from workbench.keeper.run.restart import (
    Loss,
    describe_loss,
    end_earlier_ranks,
    pods_lost,
    replace_lost_pods,
    restart_on,
)
from workbench.keeper.run.stage import check_hostfile, fetch_logs, resumed_from
from workbench.keeper.run.uploads import CheckpointUploader
from workbench.keeper.run.verdict import fault_of, in_users_files, verdict
from workbench.rundir.events import Event, EventKind
from workbench.rundir.outcome import MemoryPeaks
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState
from workbench.rundir.status import result_file
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
# Do not wait for a pod with a longer silence, unless the run succeeded.
_SILENT_S = 12.0
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Runner:
    """Execute a run. `run` blocks until the result is on disk."""

    def __init__(self, context: RunContext, around: AttemptDeps | None = None):
        self._around = around or AttemptDeps()
        self.context = context
        """Context of the run. Replaced by `move` and after a restart."""
        self._journal = self._around.journal(context.paths, context.redact, context.spare)
        self._peaks = MemoryPeaks()
        self._requests = StopRequests()
        self._uploader = CheckpointUploader(context, self._journal.event)
        self._returned = PulledCheckpoints()
        self._brought = PulledOutputs()
        # Pods with nothing of the run left but checkpoints.
        self._emptied: set[str] = set()
        # Restart that a dead keeper had decided and not prepared.
        self._unfinished: Loss | None = None
        # Event of a restart, until its pods are prepared.
        self._restart_event: Event | None = None
        self._attempt = self._new_attempt(rejoin=context.inherited)
        self._started_s = now_s()
        self._cleared = False
        self._unbrought = False
        self._settling = threading.Lock()
        self._ended = context.inherited and self.ended

    @property
    def ended(self) -> bool:
        return result_file(self.context.paths).exists()

    @property
    def over(self) -> bool:
        """Whether the run has ended, also without a result on disk."""
        return self._ended

    @property
    def outcome(self) -> dict[str, object]:
        """State and message of the run, and the result after its end, even if no file has them."""
        state, message = self._journal.current_state
        return {"state": state, "message": message, "result": self._journal.result}

    def enqueue(self) -> None:
        """Record the run as queued and reserve disk space for its result.

        Raises OSError for a new run if the disk has no space.
        """
        try:
            self._journal.reserve()
        except OSError as error:
            if not self.context.inherited:
                raise
            logger.warning("no room is kept for the result of %s: %s", self.context.run_id, error)
        # Otherwise the journal already has the state.
        if not self.context.inherited:
            self._journal.state(RunState.QUEUED, "waiting for free pods")

    def keep_state(self) -> None:
        """Rewrite the state file if it was changed or deleted, until the run ends.

        A state or a result that the disk did not take is written later.
        """
        if not self._ended or self._journal.is_late:
            self._journal.keep()

    def cancel(self) -> None:
        """Cancel the run; its state becomes cancelled. Does nothing after the end. Idempotent."""
        if self._ended:
            return
        self._requests.cancel.set()
        self._journal.wish("cancel")

    def stop(self) -> None:
        """Ask the run to stop within two steps and to save its model. Idempotent.

        The state becomes stopped.
        """
        if self._ended:
            return
        self._requests.stop.set()
        self._journal.wish("stop")
        self._attempt.stop()

    def stacks(self) -> dict[int, str]:
        return self._attempt.stacks()

    def move(self, links: Sequence[AgentLink]) -> None:
        """Move the queued run to other pods. Do nothing if its hostfile was edited.

        `run` then fails with the hostfile error.
        """
        with suppress(RunError):
            check_hostfile(self.context)
            self.context = self.context.on(links)
            self._attempt = self._new_attempt()

    def run(self) -> RunState:
        """Execute the run. Any error, also of the keeper, becomes a result and is not raised."""
        with isolate_run_errors(self.context.run_id, "carrying out the run", end=self.fail):
            return self._run()
        return RunState.FAILED

    def fail(self, error: Exception) -> None:
        """End the run as failed after an error in its folder or on this machine. Raises nothing."""
        if self._attempt.begun or self.context.inherited:
            stop_ranks(self.context.links, self.context.run_id)
        kind = type(error).__name__
        self._end(
            RunState.FAILED,
            f"the run could not continue: {error}",
            RunFault(kind=kind, message=str(error)),
        )

    def _run(self) -> RunState:
        self._started_s = now_s()
        if self.context.inherited:
            self._recover()
        self._journal.begin(self._started_s)
        collector, fault = self._try_until_over()
        fault = in_users_files(self.context.run_id, self.context.spec.job, fault)
        with TransferProgress(
            self.context.links, self._journal.hint, "bringing results back"
        ) as progress:
            self._returned = collector.finish(self._attempt.ledger.lost)
            fault = self._bring_back(fault, progress)
        self._store_checkpoints()
        state, message = verdict(
            self.context,
            self._attempt.ledger,
            self._attempt.live_processes,
            fault,
            self._returned,
            self._brought,
            asked_to_stop=self._requests.stop.is_set() and not self._requests.cancel.is_set(),
        )
        with self._settling:
            # Write the result first. Otherwise another keeper would find empty pods and train
            # again.
            self._write_result(state, message, fault)
            self.context.decide(DecisionKind.ENDED, state=state, message=message)
            self._ended = True
            is_whole = fault is None and self._attempt.ledger.all_done
            # The copies on the pods are the only ones while the disk does not have the files.
            if is_whole and not self._attempt.ledger.cut and self._journal.is_synced:
                self._clear()
                self._cleared = not (self._keeps_checkpoints or self._brought.keeps)
                self.context.decide(DecisionKind.CLEARED)
        return state

    def _store_checkpoints(self) -> None:
        """Wait for the uploads to the object store, if the job has one."""
        if self._uploader.address:
            self._journal.hint(f"uploading checkpoints to {self._uploader.address}")
            notes = self._uploader.finish(self._requests.cancel.is_set)
            self._returned = replace(self._returned, stored=notes)

    def _try_until_over(self) -> tuple[CheckpointCollector, RunFault | None]:
        """Make attempts until one is the last. Return its collector, and its fault."""
        loss = self._unfinished
        fault: RunFault | None = None
        if loss is None:
            collector, fault = self._try()
            loss = self._loss(fault)
        else:
            fault = loss.fault
            collector = self._new_collector()
        while loss is not None:
            try:
                goes_on = self._prepare_restart(loss, collector)
            except (WorkbenchError, OSError) as error:
                fault = fault or loss.fault
                why = f"{fault.message}; the run could not continue: {error}"
                return collector, replace(fault, message=why)
            if not goes_on:
                return collector, None
            collector, fault = self._try()
            loss = self._loss(fault)
        return collector, fault

    def _new_collector(self) -> CheckpointCollector:
        return CheckpointCollector(
            self.context,
            lambda: self._attempt.ledger.totals.saved_step,
            came=self._uploader.offer,
            busy=lambda: self._uploader.busy,
        )

    def _try(self) -> tuple[CheckpointCollector, RunFault | None]:
        collector = self._new_collector()
        collector.start()
        fault = self._attempt.run()
        if fault is not None and self._port_was_taken(fault):
            logger.warning(
                "another process took port %d; once more with another", self._attempt.master_port
            )
            totals = self._attempt.ledger.totals
            self.context = replace(self.context, attempt=self.context.attempt + 1)
            self._attempt = self._new_attempt()
            self._attempt.ledger.totals = totals
            fault = self._attempt.run()
        return collector, fault

    @property
    def _unwanted(self) -> bool:
        """Whether a user has asked the run to end."""
        return self._requests.cancel.is_set() or self._requests.stop.is_set()

    def _loss(self, fault: RunFault | None) -> Loss | None:
        """Return the loss of the last attempt. Return None if no restart is due."""
        context = self.context
        if fault is None or self._unwanted or context.restart >= context.spec.job.restarts:
            return None
        # A dead keeper had copied the outputs back: the run was over.
        if context.decided is not None and context.decided.brought:
            return None
        ledger = self._attempt.ledger
        what = describe_loss(ledger, fault)
        if not what:
            return None
        return Loss(
            what=what,
            why=fault.message,
            pods=sorted(pods_lost(ledger, fault)),
            lost_s=now_s(),
        )

    def _prepare_restart(self, loss: Loss, collector: CheckpointCollector) -> bool:
        """Prepare a restart after a loss. Return False if the run is not wanted any more."""
        context = self.context
        totals = self._attempt.ledger.totals
        restart = context.restart + 1
        which = f"restart {restart} of {context.spec.job.restarts}"
        logger.warning("run %s: %s; %s: %s", context.run_id, loss.what, which, loss.why)
        self._journal.state(RunState.STARTING, f"{loss.what}; {which}")
        lost = set(loss.pods)
        if loss is self._unfinished:
            if self._unwanted:
                return False
            # The decision is in the log already. Any pod may have been lost since.
            end_earlier_ranks(context)
            lost = {link.pod.name for link in context.links}
        else:
            replace(context, attempt=context.attempt + 1).decide(
                DecisionKind.RESTARTED, restart=restart, loss=loss.to_facts()
            )
        returned = collector.finish(loss.pods)
        links = replace_lost_pods(context, lost, self._requests)
        if links is None:
            return False
        prepare = partial(restart_on, context, links, totals, loss, returned)
        self.context, self._restart_event = retry_on_exhaustion(prepare, self._journal.hint)
        self._attempt = self._new_attempt()
        self._attempt.ledger.totals = totals
        return True

    def _staged(self) -> None:
        """Record that all pods are prepared. A restart counts from now on."""
        context = self.context
        event = self._restart_event
        facts: dict[str, object] = {
            "pods": [link.pod.name for link in context.links],
            "restart": context.restart,
        }
        if event is not None:
            facts["event"] = {"time_s": event.time_s, "data": dict(event.data)}
        context.decide(DecisionKind.STAGED, **facts)
        if event is not None:
            self._take_restart(event)
        self._restart_event = None

    def _take_restart(self, event: Event) -> None:
        self._journal.event(event)
        self._attempt.ledger.totals.take(event)

    def _adopted(self, context: RunContext) -> None:
        """Continue with ranks of an attempt that the log of decisions does not know."""
        self.context = context
        totals = self._attempt.ledger.totals
        resumed = resumed_from(context.paths)
        while len(totals.restarts) < context.restart:
            data = {
                "what": "a loss was not recorded, as the disk of the dead keeper was full",
                "lost_step": totals.reached_step,
                "step": resumed.step if resumed else None,
                "pods": len(context.links),
                "ranks": len(context.places),
            }
            event = Event(time_s=now_s(), rank=None, kind=EventKind.RESTARTED, data=data)
            self._take_restart(event)
        self._staged()
        context.decide(DecisionKind.STARTED)

    def _recover(self) -> None:
        """Continue the journal of a dead keeper, at the attempt that its log of decisions names."""
        decided = self.context.decided
        recover = partial(
            self._journal.recover,
            self.context.spec.job.traits.events,
            # The keeper may have died between the line of the log and the event.
            [] if decided is None else _events_of(decided),
        )
        recovered, events = retry_on_exhaustion(recover)
        self._started_s = recovered.started_s or self._started_s
        of_pod = {link.pod.name: link.pod.address for link in self.context.links}
        addresses = {place.rank: of_pod[place.pod] for place in self.context.places}
        self._peaks.recall(events, addresses, self._journal.sampled_gib)
        totals = RunTotals.of(events)
        restart = len(totals.restarts)
        attempt = self.context.attempt
        # The keeper may have died between the run's files and its first line in the log.
        if decided is not None and decided.attempt:
            restart = decided.restart
            attempt = decided.attempt
            if decided.loss is not None:
                self._unfinished = Loss.read(decided.loss)
                restart -= 1
                attempt -= 1
        self.context = replace(self.context, restart=restart, attempt=attempt)
        self._attempt = self._new_attempt(rejoin=True)
        self._attempt.ledger.totals = totals
        if recovered.wish == "cancel":
            self._requests.cancel.set()
        elif recovered.wish == "stop":
            self._requests.stop.set()

    def dry(self) -> dict[str, object]:
        """Prepare the pods and return the launch command as JSON values. Starts no rank."""
        self._attempt.install()
        self._attempt.prepare()
        assert self._attempt.command is not None
        return asdict(self._attempt.command)

    @property
    def holds(self) -> bool:
        """Whether checkpoints of the run are only on its pods."""
        return self.context.paths.held.exists()

    @property
    def _keeps_checkpoints(self) -> bool:
        # Checkpoints that were not copied back are fetched later.
        return self.holds or bool(self._returned.notes)

    @property
    def failed(self) -> bool:
        state, _ = self._journal.current_state
        return state in (RunState.FAILED, RunState.STOPPED, RunState.CANCELLED)

    def bring(self) -> PulledCheckpoints:
        """Copy the last checkpoint from the pods and update the result. Blocks."""
        with _readable(self.context.paths):
            returned = bring_checkpoints_back(self.context, most=1)
            if returned.steps:
                gate.remove(self.context.paths.held)
            came = [f"the checkpoint of step {step} was copied back" for step in returned.steps]
            self._journal.amend("; ".join([*came, *returned.notes]))
        return returned

    def fetch(self) -> list[str]:
        """Copy remaining files from the pods and update the result. Return notes on files left."""
        # The result must be written before its pods are cleared.
        with self._settling, _readable(self.context.paths):
            notes = self._fetch()
            if self._uploader.is_behind:
                notes += self._uploader.upload()
                self._journal.amend("; ".join(notes))
            return notes

    def _fetch(self) -> list[str]:
        if not self._ended:
            raise RunError(
                f"run {self.context.run_id} has not ended; outputs are copied back at its end"
            )
        if self._cleared:
            return []
        context = self.context
        rest = [link for link in context.links if link.pod.name not in self._emptied]
        # The files of the other pods are copied, also if a pod does not answer.
        failed: dict[str, WorkbenchError] = {}
        for link in rest:
            try:
                link.ensure()
                fetch_logs(context, link)
            except (RemoteError, PodError) as error:
                failed[link.pod.name] = error
        brought = PulledOutputs()
        if rest:
            try:
                brought = bring_back(context, failed.keys(), rest=True)
            except RemoteError as error:
                failed.setdefault(rest[0].pod.name, error)
        returned = bring_checkpoints_back(context, failed.keys())
        if failed:
            raise next(iter(failed.values()))
        if self._unbrought:
            self._journal.mend(
                "all ranks finished; the results were copied back later",
                output_facts(context.paths),
            )
        else:
            self._journal.amend(
                "the files on the pods were copied back later", output_facts(context.paths)
            )
        self._unbrought = False
        notes = [*returned.notes, *brought.notes]
        notes += [f"{name} stays there" for name in brought.strange]
        return notes

    def abandon(self, why: str) -> None:
        """End a run that this keeper never started as cancelled. Raises nothing."""
        self._end(RunState.CANCELLED, why, None, DecisionKind.WITHDRAWN)

    def _end(
        self,
        state: RunState,
        message: str,
        fault: RunFault | None,
        what: DecisionKind = DecisionKind.ENDED,
    ) -> None:
        # The run's folder may be stale or gone. The keeper and its log then have the result.
        with isolate_run_errors(
            self.context.run_id,
            "writing the result",
            end=lambda _: self._journal.finish_in_memory(state, message),
        ):
            if what is DecisionKind.WITHDRAWN and self.context.inherited:
                # Ranks may have printed events that the dead keeper has not written.
                recovered, _ = self._journal.recover(self.context.spec.job.traits.events)
                self._started_s = recovered.started_s or self._started_s
            self._write_result(state, message, fault)
        self.context.decide(what, state=state, message=message)
        self._ended = True

    def _new_attempt(self, *, rejoin: bool = False) -> Attempt:
        return Attempt(
            self.context,
            self._journal,
            self._peaks,
            self._requests,
            rejoin=rejoin,
            staged=self._staged,
            adopted=self._adopted,
            around=self._around,
        )

    def _port_was_taken(self, fault: RunFault) -> bool:
        """Whether another process took the port of torch's rendezvous, as named in the error."""
        text = fault.message + fault.traceback
        if re.search(rf"\b{self._attempt.master_port}\b", text) is None:
            return False
        if _PORT_TAKEN.search(text) is None:
            return False
        return not self._attempt.ledger.totals.training

    def _bring_back(self, fault: RunFault | None, progress: TransferProgress) -> RunFault | None:
        context = self.context
        ledger = self._attempt.ledger
        # Nothing of the run was started.
        if not (self._attempt.begun or context.inherited):
            return fault
        try:
            # Otherwise the previous keeper has already copied the results.
            if not (context.inherited and context.paths.manifest.exists()):
                unreached = set(ledger.lost)
                if not ledger.all_done:
                    unreached.update(ledger.silent(_SILENT_S))
                self._brought = bring_back(context, unreached, progress.say)
            context.decide(DecisionKind.BROUGHT)
        except Exception as error:  # The run's own outcome must be written in any case.
            logger.exception("bringing back %s", self.context.run_id)
            self._unbrought = fault is None and self._attempt.ledger.all_done
            why = (
                f"the results could not be copied back: {error}; "
                "run.fetch() tries again while the cluster exists"
            )
            if fault is None and isinstance(error, RemoteError):
                return replace(fault_of(context, error), message=why)
            return fault or RunFault(kind=type(error).__name__, message=why)
        return fault

    def _clear(self) -> None:
        for link in self.context.links:
            name = link.pod.name
            if name in self._brought.keeps:
                continue
            with isolate_run_errors(self.context.run_id, f"clearing {name}"):
                folders = self.context.on_pod(link)
                clear(link, folders, all_but_checkpoints=self._keeps_checkpoints)
                self._emptied.add(name)

    def _command(self) -> str:
        if self._attempt.command is not None:
            return str(self._attempt.command)
        if not self.context.inherited:
            return ""
        with suppress(OSError):
            return gate.read_text(self.context.paths.command).strip()
        return ""

    def _write_result(self, state: RunState, message: str, fault: RunFault | None) -> None:
        self._journal.finish(
            state,
            message=message,
            fault=fault,
            facts={
                "command": self._command(),
                "started_s": self._started_s,
                "peak_memory_gib": self._peaks.gib,
                "memory_kind": self._peaks.kind,
                "host_memory_gib": self._peaks.resident_gib,
                "package": PurePosixPath(self.context.links[0].package).name,
                "left_processes": self._attempt.live_processes,
                **output_facts(self.context.paths),
            },
            spec=self.context.spec,
            pods=[link.pod for link in self.context.links],
            world_size=len(self.context.places),
        )


@contextmanager
def _readable(paths: RunPaths) -> Iterator[None]:
    """Raise RunError in place of an error of the run's folder here."""
    try:
        yield
    except WorkbenchError:
        raise
    except OSError as error:
        raise RunError(
            f"files of the run cannot be copied back to {paths.root}: {error}; "
            "run.fetch() tries again while the cluster exists"
        ) from error


def _events_of(decided: RunDecisions) -> list[Event]:
    """Return the events of all restarts of a run in the log of decisions."""
    events = []
    for raw in decided.events:
        time_s = number(raw.get("time_s")) or now_s()
        data = part(raw, "data")
        event = Event(time_s=time_s, rank=None, kind=EventKind.RESTARTED, data=data)
        events.append(event)
    return events
