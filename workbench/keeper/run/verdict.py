"""In which state a run ended, the line that says how, and whom to blame where no rank failed by itself."""

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
    left_processes: int | None,
    fault: RunFault | None,
    returned: Returned,
    brought: Brought,
    *,
    asked_to_stop: bool = False,
) -> tuple[RunState, str]:
    """Return the state in which a run ended, and the line that says how, for people.

    `asked_to_stop`: the run was asked to stop by itself, and was not cancelled afterwards.
    """
    totals = ledger.totals
    resumed = (
        None if totals.restarts else resumed_from(context.paths)
    )  # those say from where themselves
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
    if left_processes is None:
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
        state, how = RunState.STOPPED, f"stopped after {after}"
    else:
        state, how = RunState.SUCCEEDED, "every rank is done"
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
    """Blame the pod that an error came from."""
    names = [link.pod.name for link in context.links if link.pod.address == error.host]
    match error:
        case PodGone():
            kind = "pod"
        case _:
            kind = type(error).__name__
    return RunFault(kind=kind, message=str(error), host=error.host, pod=names[0] if names else "")


def in_users_files(run_id: str, job: Job, fault: RunFault | None) -> RunFault | None:
    """Return a fault whose traceback names files where the user has them, not the copies on the pods."""
    if fault is None:
        return None
    return replace(fault, traceback=job.in_users_files(fault.traceback, run_id))


def lost_pod(context: RunContext, ledger: RunLedger) -> RunFault:
    """Blame the first pod that is lost; where none of several answers, its node or the network."""
    name, why = next(iter(ledger.lost.items()))
    unknown = {
        pod.name: pod.message for pod in _platform_pods(context) if pod.phase is Phase.UNKNOWN
    }
    if lost := [
        each for each in ledger.lost if each in unknown
    ]:  # the platform knows that its node is lost
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
    """Return what the platform says of the pods of a run that have not ended: of several the same thing once."""
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
    """Return the pods of a run as their platform sees them; none where it sees them no other way than we do."""
    if not backend_class(context.spec.cluster.backend.get("kind")).observes_pods:
        return []
    ours = {link.pod.name for link in context.links}
    try:
        return [pod for pod in context.look() if pod.name in ours]
    except WorkbenchError as error:
        logger.warning("%s", error)
        return []


def stopped_by_others(ledger: RunLedger, context: RunContext, *, unwatched: bool) -> RunFault:
    """Blame the end of an agent, which took a rank along; `unwatched` where no keeper was there."""
    stopped = next(rank for rank in ledger.ranks.values() if not rank.done)
    why = "was ended together with the agent of its pod, and not by this run's keeper"
    if unwatched:
        why = "was ended when its keeper had died and no other was there within the lease of its pod's agent"
        if context.restarted:
            why = "ended with its pod when this machine was started again"
    return RunFault(
        host=stopped.pod.address, pod=stopped.pod.name, rank=stopped.rank, kind="pod", message=why
    )
