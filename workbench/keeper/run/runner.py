"""Carry a run from start to result: carry out the action of every state, and report the fact.

The result is written last and marks the end of the run. `states` decides what follows a fact.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import PurePosixPath

from workbench.base.clock import now_s
from workbench.base.errors import PodError, RemoteError, RunError, WorkbenchError
from workbench.base.files.records import try_read
from workbench.base.json_values import as_float, get_object
from workbench.jobs.launcher import Launcher
from workbench.keeper.boundary import isolate_run_errors
from workbench.keeper.checkpoints import (
    CheckpointCollector,
    PulledCheckpoints,
    bring_checkpoints_back,
)
from workbench.keeper.decisions import RunDecisions
from workbench.keeper.launch import check_launcher_fits
from workbench.keeper.link.agent import AgentLink, PodGone, stop_ranks
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.link.files import TransferProgress
from workbench.keeper.resource_limits import retry_on_exhaustion
from workbench.keeper.run.attempt import Attempt, AttemptDeps
from workbench.keeper.run.outputs import PulledOutputs, bring_back, clear, output_facts
from workbench.keeper.run.policy import AttemptEnd, Outcome
from workbench.keeper.run.restart import (
    InheritedRanks,
    end_earlier_ranks,
    inherited_ranks,
    replace_lost_pods,
    restart_on,
)
from workbench.keeper.run.stage import check_hostfile, fetch_logs, resumed_from
from workbench.keeper.run.states import Fact, Phase, State, recovered, step
from workbench.keeper.run.uploads import CheckpointUploader
from workbench.keeper.run.verdict import fault_of, in_users_files, verdict
from workbench.rundir.events import Event, EventKind
from workbench.rundir.outcome import MemoryPeaks
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState
from workbench.rundir.status import has_result
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
# Do not wait for a pod with a longer silence, unless the run succeeded.
_SILENT_S = 12.0
_BEFORE_RANKS = (Phase.QUEUED, Phase.FINDING, Phase.ENDING, Phase.PREPARING)


class Runner:
    """Execute a run. `run` blocks until the result is on disk."""

    def __init__(self, context: RunContext, around: AttemptDeps | None = None):
        self._around = around or AttemptDeps()
        self.context = context
        """Context of the run. Replaced by `move`, and at every attempt."""
        self._journal = self._around.journal(context.paths, context.redact, context.spare)
        self._peaks = MemoryPeaks()
        self._totals = RunTotals()
        self._requests = StopRequests()
        self._uploader = CheckpointUploader(context, self._journal)
        self._returned = PulledCheckpoints()
        self._brought = PulledOutputs()
        # Pods with nothing of the run left but checkpoints.
        self._emptied: set[str] = set()
        self._state = self._first_state()
        self._attempt = self._new_attempt()
        self._collector = self._new_collector()
        self._started_s = now_s()
        # Held from the result until the pods are cleared.
        self._settling = threading.Lock()

    def _first_state(self, counted: int = 0) -> State:
        restarts = self.context.spec.job.restarts
        if not self.context.inherited:
            return State(restarts=restarts)
        state = recovered(self.context.decided, restarts=restarts, counted=counted)
        # The keeper died between the result and its row.
        if self.ended and not state.phase.is_terminal:
            return replace(state, phase=Phase.ENDED)
        return state

    @property
    def ended(self) -> bool:
        return has_result(self.context.paths)

    @property
    def over(self) -> bool:
        """Whether the run has ended, also without a result on disk."""
        return self._state.phase.is_terminal

    @property
    def outcome(self) -> dict[str, object]:
        """State and message of the run, and the result after its end, even if no file has them."""
        state, message = self._journal.current_state
        return {"state": state, "message": message, "result": self._journal.result}

    @property
    def wanted(self) -> int:
        """Number of pods that the run needs."""
        return len(self.context.links) or self.context.spec.pods or 1

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
            pods = "free pods" if self.context.links else "the pods of the cluster to start"
            self._journal.state(RunState.QUEUED, f"waiting for {pods}")

    def keep_state(self) -> None:
        """Rewrite a changed or deleted state file, until the run ends.

        A state or a result without room on the disk is written later.
        """
        if not self.over or self._journal.is_late:
            self._journal.keep()

    def cancel(self) -> None:
        """Cancel the run; its state becomes cancelled. Does nothing after the end. Idempotent."""
        if self.over:
            return
        self._requests.cancel.set()
        self._journal.wish("cancel")

    def stop(self) -> None:
        """Ask the run to stop within two steps and to save its model. Idempotent.

        The state becomes stopped.
        """
        if self.over:
            return
        self._requests.stop.set()
        self._journal.wish("stop")
        self._forward_stop()

    def _forward_stop(self) -> None:
        """Forward a request to stop, if the phase has ranks that can be asked."""
        can_ask = [Phase.RUNNING]
        if self.context.spec.job.rules.stop.by == "file":
            can_ask.append(Phase.STAGED)
        if self._requests.stop.is_set() and self._state.phase in can_ask:
            self._attempt.stop()

    def stacks(self) -> dict[int, str]:
        if self._state.phase in _BEFORE_RANKS:
            raise RunError("the ranks have not been started yet")
        return self.context.stacks()

    def move(self, links: Sequence[AgentLink]) -> None:
        """Move the queued run to other pods, or to its first. Do nothing for an edited hostfile.

        `run` then fails with the hostfile error.
        """
        check_launcher_fits(Launcher(self.context.spec.job.launcher), [link.pod for link in links])
        try:
            if self.context.links:
                check_hostfile(self.context)
        except RunError as error:
            logger.info("run %s is not moved: %s", self.context.run_id, error)
            return
        self.context = self.context.on(links)
        self._attempt = self._new_attempt()

    def run(self) -> RunState:
        """Execute the run. Any error, also of the keeper, becomes a result and is not raised."""
        with isolate_run_errors(self.context.run_id, "carrying out the run", end=self.fail):
            return self._run()
        return RunState.FAILED

    def fail(self, error: Exception) -> None:
        """End the run as failed after an error in its folder or on the machine. Raises nothing."""
        if self._state.phase is not Phase.QUEUED:
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
        self._collector = self._new_collector()
        if self._state.phase is not Phase.ENDING:
            self._collector.start()
        self._advance(Phase.BRINGING, Phase.WRITING)
        with self._bringing():
            self._returned = self._collector.finish(self._attempt.ledger.lost)
        self._advance(Phase.WRITING)
        self._store_checkpoints()
        with self._settling:
            self._advance()
        return RunState(self._journal.current_state[0])

    def _advance(self, *until: Phase) -> None:
        """Carry out the actions of the run's phases, until one of the given or the last phase."""
        actions: Mapping[Phase, Callable[[], Fact]] = {
            Phase.QUEUED: lambda: Fact(kind=Outcome.READY),
            Phase.FINDING: partial(self._in_attempt, self._find),
            Phase.ENDING: self._end_earlier,
            Phase.PREPARING: self._prepare,
            Phase.STAGED: partial(self._in_attempt, self._launch),
            Phase.RUNNING: partial(self._in_attempt, self._follow),
            Phase.RESTARTING: self._restart,
            Phase.BRINGING: self._bring_back,
            Phase.WRITING: self._write,
            Phase.CLEARING: self._clear,
        }
        while self._state.phase in actions and self._state.phase not in until:
            self._take(actions[self._state.phase]())

    def _take(self, fact: Fact) -> None:
        """Take the step of a fact: write its decision, and enter the next state."""
        before = self._state
        state, decision = step(before, fact)
        self.context = replace(self.context, attempt=state.attempt, restart=state.restart)
        logger.info("run %s is %s: attempt %d", self.context.run_id, state.phase, state.attempt)
        if decision is not None:
            facts = {"restart": state.restart, **fact.facts}
            if state.loss is not None:
                facts["loss"] = state.loss.to_facts()
            if before.event is not None:
                facts["event"] = {"time_s": before.event.time_s, "data": dict(before.event.data)}
            self.context.decide(decision, **facts)
        # A restart counts once all pods are prepared. A new keeper writes a missing event.
        if decision is DecisionKind.STAGED and before.event is not None:
            self._take_restart(before.event)
        self._state = state

    def _store_checkpoints(self) -> None:
        """Wait for the uploads to the object store, if the job has one."""
        if self._uploader.address:
            self._journal.hint(f"uploading checkpoints to {self._uploader.address}")
            notes = self._uploader.finish(self._requests.cancel)
            self._returned = replace(self._returned, stored=notes)

    def _in_attempt(self, part: Callable[[], Fact | RunFault | None]) -> Fact:
        """Carry out a part of the attempt, and end an attempt that is over.

        An attempt is over when the part returns no fact, or raises an error.
        """
        try:
            fact = part()
        except Exception as error:  # Thread boundary: any failure becomes a failed run.
            fact = self._attempt.explain(error)
        if isinstance(fact, Fact):
            return fact
        context = self.context
        fault = self._attempt.end(fact)
        end = AttemptEnd(
            fault=in_users_files(context.run_id, context.spec.job, fault),
            lost=self._attempt.ledger.lost,
            port=self._attempt.master_port,
            has_trained=self._totals.training,
            is_unwanted=self._unwanted,
            time_s=now_s(),
        )
        return Fact(end=end)

    def _find(self) -> Fact:
        self._journal.hint("a new keeper takes over from a dead keeper, and looks for the ranks")
        context = self.context
        try:
            found = retry_on_exhaustion(partial(inherited_ranks, context), self._journal.hint)
        except PodGone as error:
            # The lost pod may answer, with ranks of an earlier attempt.
            stop_ranks(
                [link for link in context.links if link.pod.address == error.host], context.run_id
            )
            # Ranks on the other pods may be alive. Watch and end them as after any lost pod.
            found = InheritedRanks(
                launcher=None,
                unwatched=False,
                attempt=context.attempt,
                restart=context.restart,
                gone=error,
            )
        if found is None:
            return Fact(kind=Outcome.READY)
        self.context = replace(context, attempt=found.attempt, restart=found.restart)
        if found.attempt != context.attempt:
            self._count_unrecorded()
        self._attempt = self._new_attempt(found)
        self._attempt.watch()
        return Fact(kind=DecisionKind.STARTED, attempt=found.attempt, restart=found.restart)

    def _count_unrecorded(self) -> None:
        """Count the restarts before an attempt that the log of decisions does not know."""
        context = self.context
        resumed = resumed_from(context.paths)
        while len(self._totals.restarts) < context.restart:
            data = {
                "what": "a loss was not recorded, as the disk of the dead keeper was full",
                "lost_step": self._totals.reached_step,
                "step": resumed.step if resumed else None,
                "pods": len(context.links),
                "ranks": len(context.places),
            }
            event = Event(time_s=now_s(), rank=None, kind=EventKind.RESTARTED, data=data)
            self._take_restart(event)

    def _end_earlier(self) -> Fact:
        end_earlier_ranks(self.context)
        return Fact(kind=Outcome.OVER if self._unwanted else Outcome.READY)

    def _prepare(self) -> Fact:
        self._attempt = self._new_attempt()
        return self._in_attempt(self._stage)

    def _stage(self) -> Fact:
        self._attempt.stage()
        if self._attempt.is_unwanted:
            return Fact()
        pods = [link.pod.name for link in self.context.links]
        return Fact(kind=DecisionKind.STAGED, facts={"pods": pods})

    def _launch(self) -> Fact:
        self._forward_stop()
        self._attempt.launch()
        return Fact(kind=DecisionKind.STARTED)

    def _follow(self) -> RunFault | None:
        # A file was written before the start of ranks, but not by a keeper that died.
        if self.context.inherited or self.context.spec.job.rules.stop.by == "signal":
            self._forward_stop()
        return self._attempt.follow()

    def _restart(self) -> Fact:
        """Replace lost pods, and prepare the files of the next attempt."""
        context = self.context
        loss = self._state.loss
        fault = self._state.fault
        assert loss is not None and fault is not None
        which = f"restart {context.restart} of {context.spec.job.restarts}"
        logger.warning("run %s: %s; %s: %s", context.run_id, loss.what, which, loss.why)
        self._journal.state(RunState.STARTING, f"{loss.what}; {which}")
        try:
            returned = self._collector.finish(loss.pods)
            links = replace_lost_pods(context, self._state.suspects, self._requests)
            if links is None:
                return Fact()
            prepare = partial(restart_on, context, links, self._totals, loss, returned)
            self.context, event = retry_on_exhaustion(prepare, self._journal.hint)
        except (WorkbenchError, OSError) as error:
            why = f"{fault.message}; the run could not continue: {error}"
            return Fact(fault=replace(fault, message=why))
        self._collector = self._new_collector()
        self._collector.start()
        return Fact(kind=Outcome.READY, event=event)

    def _new_collector(self) -> CheckpointCollector:
        self._uploader.by_pods.context = self.context
        return CheckpointCollector(self.context, self._totals, self._uploader)

    @property
    def _unwanted(self) -> bool:
        """Whether a user has asked the run to end."""
        return self._requests.cancel.is_set() or self._requests.stop.is_set()

    def _take_restart(self, event: Event) -> None:
        self._journal.event(event)
        self._totals.take(event)

    def _recover(self) -> None:
        """Continue the journal of a dead keeper, at the attempt named in the decisions."""
        decided = self.context.decided
        recover = partial(
            self._journal.recover,
            self.context.spec.job.traits.events,
            # The keeper may have died between the row of a restart and its event.
            _events_of(decided),
        )
        record, events = retry_on_exhaustion(recover)
        self._started_s = record.started_s or self._started_s
        of_pod = {link.pod.name: link.pod.address for link in self.context.links}
        addresses = {place.rank: of_pod[place.pod] for place in self.context.places}
        self._peaks.recall(events, addresses, self._journal.sampled_gib)
        self._totals = RunTotals.of(events)
        self._state = self._first_state(len(self._totals.restarts))
        self.context = replace(
            self.context, attempt=self._state.attempt, restart=self._state.restart
        )
        self._attempt = self._new_attempt()
        if record.wish == "cancel":
            self._requests.cancel.set()
        elif record.wish == "stop":
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
                self.context.paths.held.unlink(missing_ok=True)
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
        if not self.over:
            raise RunError(
                f"run {self.context.run_id} has not ended; outputs are copied back at its end"
            )
        if self._state.phase is Phase.CLEARED:
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
        if self._attempt.ledger.all_done and not self._state.is_brought:
            self._journal.mend(
                "all ranks finished; the results were copied back later",
                output_facts(context.paths),
            )
            self._take(Fact(kind=DecisionKind.BROUGHT))
        else:
            self._journal.amend(
                "the files on the pods were copied back later", output_facts(context.paths)
            )
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
        kind: DecisionKind = DecisionKind.ENDED,
    ) -> None:
        if self.over:
            return
        # The run's folder may be stale or gone. The keeper and its log then have the result.
        with isolate_run_errors(
            self.context.run_id,
            "writing the result",
            end=lambda _: self._journal.finish_in_memory(state, message),
        ):
            if kind is DecisionKind.WITHDRAWN and self.context.inherited:
                # Ranks may have printed events that the dead keeper has not written.
                record, _ = self._journal.recover(self.context.spec.job.traits.events)
                self._started_s = record.started_s or self._started_s
            self._write_result(state, message, fault)
        self._take(Fact(kind=kind, facts={"state": state, "message": message}))

    def _new_attempt(self, found: InheritedRanks | None = None) -> Attempt:
        return Attempt(
            self.context,
            self._journal,
            self._peaks,
            self._requests,
            totals=self._totals,
            around=self._around,
            found=found,
        )

    def _bringing(self) -> TransferProgress:
        return TransferProgress(self.context.links, self._journal.hint, "bringing results back")

    def _bring_back(self) -> Fact:
        context = self.context
        ledger = self._attempt.ledger
        fault = self._state.fault
        try:
            # Otherwise the previous keeper has already copied the results.
            if not (context.inherited and context.paths.manifest.exists()):
                unreached = set(ledger.lost)
                if not ledger.all_done:
                    unreached.update(ledger.silent(_SILENT_S))
                with self._bringing() as progress:
                    self._brought = bring_back(context, unreached, progress.say)
        except Exception as error:  # The run's own outcome must be written in any case.
            logger.exception("bringing back %s", context.run_id)
            why = (
                f"the results could not be copied back: {error}; "
                "run.fetch() tries again while the cluster exists"
            )
            if fault is None and self._unwanted and not ledger.all_done:
                # The run ends as it was asked to.
                self._brought = PulledOutputs(notes=[why])
                return Fact()
            if fault is None and isinstance(error, RemoteError):
                fault = replace(fault_of(context, error), message=why)
            fault = fault or RunFault(kind=type(error).__name__, message=why)
            return Fact(fault=fault)
        return Fact(kind=DecisionKind.BROUGHT)

    def _write(self) -> Fact:
        fault = self._state.fault
        ledger = self._attempt.ledger
        state, message = verdict(
            self.context,
            ledger,
            self._attempt.live_processes,
            fault,
            self._returned,
            self._brought,
            asked_to_stop=self._requests.stop.is_set() and not self._requests.cancel.is_set(),
        )
        # Write the result first. Otherwise another keeper would find empty pods and train again.
        self._write_result(state, message, fault)
        return Fact(kind=DecisionKind.ENDED, facts={"state": state, "message": message})

    def _clear(self) -> Fact:
        ledger = self._attempt.ledger
        is_whole = self._state.fault is None and ledger.all_done and not ledger.cut
        # The copies on the pods are the only ones while the disk does not have the files.
        if not (is_whole and self._journal.is_synced):
            return Fact()
        for link in self.context.links:
            name = link.pod.name
            if name in self._brought.keeps:
                continue
            with isolate_run_errors(self.context.run_id, f"clearing {name}"):
                folders = self.context.on_pod(link)
                clear(link, folders, all_but_checkpoints=self._keeps_checkpoints)
                self._emptied.add(name)
        is_kept = self._keeps_checkpoints or self._brought.keeps
        return Fact(kind=Outcome.OVER if is_kept else DecisionKind.CLEARED)

    def _command(self) -> str:
        if self._attempt.command is not None:
            return str(self._attempt.command)
        if not self.context.inherited:
            return ""
        return (try_read(self.context.paths.command) or b"").decode(errors="replace").strip()

    @property
    def _package(self) -> Mapping[str, str]:
        """Return the package of the run's pods; nothing for a run that never had pods."""
        links = self.context.links
        return {"package": PurePosixPath(links[0].package).name} if links else {}

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
                **self._package,
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


def _events_of(decided: RunDecisions | None) -> list[Event]:
    """Return the events of all restarts of a run in the log of decisions."""
    events = []
    for raw in decided.events if decided is not None else ():
        time_s = as_float(raw.get("time_s")) or now_s()
        data = get_object(raw, "data")
        event = Event(time_s=time_s, rank=None, kind=EventKind.RESTARTED, data=data)
        events.append(event)
    return events
