"""Decide the final state of a run and its message, and assign faults without a failed rank."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from workbench.base.errors import RemoteError, WorkbenchError
from workbench.base.words import counted, short_list, size
from workbench.jobs.job import Job
from workbench.keeper.checkpoints import Returned
from workbench.keeper.link.agent import PodGone
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.outputs import Brought, output_facts
from workbench.keeper.run.stage import resumed_from
from workbench.keeper.watch.ledger import CUT_OFF, RunLedger
from workbench.pods.backends import backend_class
from workbench.pods.pod import Phase, Pod
from workbench.rundir.outcome import fold_failures
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)


def verdict(
    context: RunContext,
    ledger: RunLedger,
    live_processes: int | None,
    fault: RunFault | None,
    returned: Returned,
    brought: Brought,
    *,
    asked_to_stop: bool = False,
) -> tuple[RunState, str]:
    """Return the final state of a run and the message for people.

    `asked_to_stop`: the run was asked to stop and was not cancelled later.
    """
    totals = ledger.totals
    # Restart notes already name their starting step.
    resumed = None if totals.restarts else resumed_from(context.paths)
    notes = [f"it went on from step {resumed.step}", *resumed.notes] if resumed else []
    notes += [*ledger.warnings, *returned.notes]
    if strange := brought.strange:
        notes += [
            f"not brought back, as only model/, files/ and the run's own files are: {short_list(strange)}"
        ]
    match output_facts(context.paths):
        case {"output_files": int() as files, "output_bytes": int() as bytes_}:
            notes += [f"outputs/ has {counted(files, 'file')} ({size(bytes_)}) that it wrote"]
    notes += brought.notes
    succeeded = fault is None and ledger.all_done and totals.stopped_step is None
    if returned.steps and not succeeded:
        held = context.paths.held.exists()
        where = "; it is on the pods, and comes back when the cluster closes" if held else ""
        notes += [f"resume=run.path goes on from its checkpoint of step {returned.steps[0]}{where}"]
    notes += (
        [f"{ledger.incomplete}; run.fetch() brings the rest while the cluster is there"]
        if ledger.cut
        else []
    )
    if live_processes is None:
        notes += ["a pod does not answer; what is left there ends with its agent's lease"]
    if fault is not None and totals.model_step is not None and context.paths.model.exists():
        notes += [f"the model was trained before: that of step {totals.model_step} is in model/"]
    if fault is not None:
        return RunState.FAILED, "; ".join(
            [str(replace(fault, traceback="", others="")), *_killed(ledger), *notes]
        )
    if not ledger.all_done:
        by_itself = asked_to_stop and bool(ledger.ranks) and not ledger.forced
        state = RunState.STOPPED if by_itself else RunState.CANCELLED
        how = f"stopped when asked{_how_it_stopped(ledger)}"
    elif totals.stopped_step is not None:
        step, saved = totals.stopped_step, returned.steps
        after = f"a checkpoint at step {step}" if saved and saved[0] == step else f"step {step}"
        state = RunState.STOPPED
        how = f"stopped after {after}"
    else:
        state = RunState.SUCCEEDED
        how = "every rank is done"
    return state, "; ".join([how, *notes])


def _killed(ledger: RunLedger) -> list[str]:
    forced = ledger.forced
    return [f"ranks {forced} did not end when asked and were killed"] if forced else []


def _how_it_stopped(ledger: RunLedger) -> str:
    ended = [rank.ended_s for rank in ledger.ranks.values() if rank.ended_s is not None]
    if ledger.forced or not ledger.asked_s or not ended:
        return "".join(f": {killed}" for killed in _killed(ledger))
    asked = {rank.asked for rank in ledger.ranks.values() if rank.asked}
    took_s = math.ceil(max(1.0, max(ended) - ledger.asked_s))
    if asked == {"Trainer"}:
        return f": its Trainer ended after a step, and its ranks by themselves within {took_s} s"
    return f": its ranks ended by themselves within {took_s} s{' of ' if asked else ''}{' and '.join(sorted(asked))}"


def fault_of(context: RunContext, error: RemoteError) -> RunFault:
    """Build a fault that blames the pod of an error."""
    names = [link.pod.name for link in context.links if link.pod.address == error.host]
    match error:
        case PodGone():
            kind = "pod"
        case _:
            kind = type(error).__name__
    return RunFault(kind=kind, message=str(error), host=error.host, pod=names[0] if names else "")


def in_users_files(run_id: str, job: Job, fault: RunFault | None) -> RunFault | None:
    """Return the fault with file names in the traceback changed from pod copies to user files."""
    if fault is None:
        return None
    return replace(fault, traceback=job.in_users_files(fault.traceback, run_id))


def lost_pod(context: RunContext, ledger: RunLedger) -> RunFault:
    """Blame the first lost pod, or the network if none of several pods answers."""
    name, why = next(iter(ledger.lost.items()))
    unknown = {
        pod.name: pod.message for pod in _platform_pods(context) if pod.phase is Phase.UNKNOWN
    }
    # The platform knows that the pod's node is lost.
    if lost := [each for each in ledger.lost if each in unknown]:
        name = lost[0]
        why = f"{ledger.lost[name]}; {unknown[name]}"
    elif len(ledger.pods) > 1 and not ledger.heard_within(context.spec.cluster.lease_s / 2):
        return RunFault(
            kind="network",
            message=f"no sign from any pod: {place_words(context) or CUT_OFF}; {why}",
        )
    address = next(link.pod.address for link in context.links if link.pod.name == name)
    fault = RunFault(pod=name, host=address, kind="pod", message=why)
    return replace(fault, others=fold_failures(ledger.ranks.values()))


def place_words(context: RunContext) -> str:
    """Return the platform's messages about running pods of a run. Equal messages are merged."""
    said: dict[str, list[str]] = {}
    for pod in _platform_pods(context):
        if pod.message and not pod.phase.is_terminal:
            said.setdefault(pod.message, []).append(pod.name)
    count = len(context.links)
    parts = [
        words if len(names) == count else f"{short_list(names)}: {words}"
        for words, names in said.items()
    ]
    return "; ".join(parts)


def _platform_pods(context: RunContext) -> list[Pod]:
    """Return the pods as seen by their platform. Empty if the platform cannot observe pods."""
    if not backend_class(context.spec.cluster.backend.get("kind")).observes_pods:
        return []
    ours = {link.pod.name for link in context.links}
    try:
        return [pod for pod in context.refresh() if pod.name in ours]
    except WorkbenchError as error:
        logger.warning("%s", error)
        return []


def stopped_by_others(ledger: RunLedger, context: RunContext, *, unwatched: bool) -> RunFault:
    """Build the fault for a rank that ended with its agent. `unwatched`: no keeper was running."""
    stopped = next(rank for rank in ledger.ranks.values() if not rank.done)
    why = "was ended together with the agent of its pod, and not by this run's keeper"
    if unwatched:
        why = "was ended when its keeper had died and no other was there within the lease of its pod's agent"
        if context.restarted:
            why = "ended with its pod when this machine was started again"
    return RunFault(
        host=stopped.pod.address, pod=stopped.pod.name, rank=stopped.rank, kind="pod", message=why
    )
