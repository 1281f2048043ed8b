"""Write the final message of a run, and assign faults to pods."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace

from workbench.base.errors import RemoteError, WorkbenchError
from workbench.base.words import pluralize, short_list, size
from workbench.jobs.job import OF_THE_RUN, Job
from workbench.keeper.checkpoints import PulledCheckpoints
from workbench.keeper.link.agent import PodGone
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.outputs import PulledOutputs, output_facts
from workbench.keeper.run.policy import final_state
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
    returned: PulledCheckpoints,
    brought: PulledOutputs,
    *,
    asked_to_stop: bool = False,
) -> tuple[RunState, str]:
    """Return the final state of a run and the message for people.

    `asked_to_stop`: the run was asked to stop and was not cancelled later.
    """
    state = final_state(ledger, fault, asked_to_stop=asked_to_stop)
    notes = _notes_on_the_way(context, ledger, returned, brought)
    notes += _notes_on_the_rest(context, ledger, returned, succeeded=state is RunState.SUCCEEDED)
    if live_processes is None:
        notes.append("a pod does not answer; processes there end with the agent's lease")
    model_step = ledger.totals.model_step
    if fault is not None and model_step is not None and os.path.lexists(context.paths.model):
        notes.append(f"the model was trained before: model/ has step {model_step}")
    if fault is not None:
        short = replace(fault, traceback="", others="")
        return state, "; ".join([str(short), *_killed(ledger), *notes])
    step = ledger.totals.stopped_step
    if not ledger.all_done:
        how = f"stopped when asked{_how_it_stopped(ledger)}"
    elif step is None:
        how = "all ranks finished"
    elif returned.steps and returned.steps[0] == step:
        how = f"stopped after a checkpoint at step {step}"
    else:
        how = f"stopped after step {step}"
    return state, "; ".join([how, *notes])


def _notes_on_the_way(
    context: RunContext, ledger: RunLedger, returned: PulledCheckpoints, brought: PulledOutputs
) -> list[str]:
    """Return notes on the start, warnings, and files that were copied back or not."""
    notes = []
    # Restart notes already name their starting step.
    if not ledger.totals.restarts:
        resumed = resumed_from(context.paths)
        if resumed:
            notes.append(f"the run continued from step {resumed.step}")
            notes += resumed.notes
    notes += _notes_on_packages(context)
    given = {*context.spec.job.env, *context.spec.cluster.pods.env}
    unused = [name for name in OF_THE_RUN if name in given]
    if unused:
        notes.append(f"env does not set {short_list(unused)}: the run decides the values")
    notes += ledger.warnings
    notes += returned.notes
    notes += returned.stored
    if brought.strange:
        names = short_list(brought.strange)
        notes.append(
            f"not copied back, as only model/, files/ and the run's own files are copied: {names}"
        )
    match output_facts(context.paths):
        case {"output_files": int() as files, "output_bytes": int() as bytes_}:
            notes.append(f"outputs/ has {pluralize(files, 'file')} ({size(bytes_)})")
    notes += brought.notes
    return notes


def _notes_on_packages(context: RunContext) -> list[str]:
    try:
        needs = context.spec.job.packages_in(context.paths.root)
    except WorkbenchError as error:  # the ranks have ended, and the run keeps its outcome
        logger.warning("%s", error)
        return []
    if needs is None:
        return []
    if needs.installs:
        return [f"environment of the ranks: {needs.words}", *needs.notes]
    return list(needs.notes)


def _notes_on_the_rest(
    context: RunContext, ledger: RunLedger, returned: PulledCheckpoints, *, succeeded: bool
) -> list[str]:
    """Return notes on what the user can still do: resume, or fetch the rest of the logs."""
    notes = []
    if returned.steps and not succeeded:
        note = f"resume=run.path continues from the checkpoint of step {returned.steps[0]}"
        if context.paths.held.exists():
            note += "; the checkpoint is on the pods, and is copied back when the cluster closes"
        if context.shared is not None:
            note += f"; the checkpoint is in {context.shared.root}"
        notes.append(note)
    if ledger.cut:
        notes.append(
            f"{ledger.incomplete}; run.fetch() copies the rest back while the cluster exists"
        )
    return notes


def _killed(ledger: RunLedger) -> list[str]:
    forced = ledger.forced
    if not forced:
        return []
    return [f"ranks {forced} did not end when asked and were killed"]


def _how_it_stopped(ledger: RunLedger) -> str:
    ended = [rank.ended_s for rank in ledger.ranks.values() if rank.ended_s is not None]
    if ledger.forced or not ledger.asked_s or not ended:
        return "".join(f": {killed}" for killed in _killed(ledger))
    asked = {rank.asked for rank in ledger.ranks.values() if rank.asked}
    last_s = max(ended) - ledger.asked_s
    took_s = math.ceil(max(1.0, last_s))
    if asked == {"Trainer"}:
        return f": the Trainer ended after a step, and the ranks by themselves within {took_s} s"
    since = ""
    if asked:
        signals = " and ".join(sorted(asked))
        since = f" of {signals}"
    return f": the ranks ended by themselves within {took_s} s{since}"


def fault_of(context: RunContext, error: RemoteError) -> RunFault:
    """Build a fault that blames the pod of an error."""
    names = [link.pod.name for link in context.links if link.pod.address == error.host]
    kind = type(error).__name__
    if isinstance(error, PodGone):
        kind = "pod"
    return RunFault(
        kind=kind,
        message=str(error),
        host=error.host,
        pod=names[0] if names else "",
    )


def in_users_files(run_id: str, job: Job, fault: RunFault | None) -> RunFault | None:
    """Return the fault with names of files changed from pod copies to user files."""
    if fault is None:
        return None
    message = job.in_users_files(fault.message, run_id)
    traceback = job.in_users_files(fault.traceback, run_id)
    return replace(fault, message=message, traceback=traceback)


def lost_pod(context: RunContext, ledger: RunLedger) -> RunFault:
    """Blame the first lost pod, or the network if none of several pods answers."""
    name, why = next(iter(ledger.lost.items()))
    pods = _platform_pods(context)
    unknown = {pod.name: pod.message for pod in pods if pod.phase is Phase.UNKNOWN}
    # The platform knows that the pod's node is lost.
    on_lost_nodes = [each for each in ledger.lost if each in unknown]
    if on_lost_nodes:
        name = on_lost_nodes[0]
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
    parts = []
    for words, names in said.items():
        if len(names) != count:
            words = f"{short_list(names)}: {words}"
        parts.append(words)
    return "; ".join(parts)


def _platform_pods(context: RunContext) -> list[Pod]:
    """Return the pods as seen by their platform. Empty if the platform cannot observe pods."""
    kind = context.spec.cluster.backend.get("kind")
    if not backend_class(kind).observes_pods:
        return []
    ours = {link.pod.name for link in context.links}
    try:
        return [pod for pod in context.refresh() if pod.name in ours]
    except WorkbenchError as error:
        logger.warning("%s", error)
        return []
