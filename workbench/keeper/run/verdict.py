"""In which state a run ended, and the line that says how, for people."""

from __future__ import annotations

import math
from dataclasses import replace

from workbench.base.words import counted, short_list, size
from workbench.keeper.checkpoints import Returned
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.attempt import Attempt
from workbench.keeper.run.outputs import Brought, output_facts
from workbench.keeper.run.stage import resumed_from
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState


def verdict(
    context: RunContext, attempt: Attempt, fault: RunFault | None, returned: Returned, brought: Brought
) -> tuple[RunState, str]:
    ledger, totals = attempt.ledger, attempt.ledger.totals
    resumed = None if totals.restarts else resumed_from(context.paths)  # those say from where themselves
    notes = [f"it went on from step {resumed.step}", *resumed.notes] if resumed else []
    notes += [*ledger.warnings, *returned.notes]
    if strange := brought.strange:
        notes += [f"not brought back, as only model/, files/ and the run's own files are: {short_list(strange)}"]
    notes += _outputs(context, brought)
    succeeded = fault is None and ledger.all_done and totals.stopped_step is None
    if returned.steps and not succeeded:
        held = context.paths.held.exists()
        where = "; it is on the pods, and comes back when the cluster closes" if held else ""
        notes += [f"resume=run.path goes on from its checkpoint of step {returned.steps[0]}{where}"]
    notes += ["the disk was full: logs here are incomplete"] if ledger.cut else []
    if attempt.left_processes is None:
        notes += ["a pod does not answer; what is left there ends with its agent's lease"]
    if fault is not None and totals.model_step is not None and context.paths.model.exists():
        notes += [f"the model was trained before: that of step {totals.model_step} is in model/"]
    if fault is not None:
        return RunState.FAILED, "; ".join([str(replace(fault, traceback="", others="")), *_killed(attempt), *notes])
    if not ledger.all_done:
        state, how = RunState.CANCELLED, f"stopped when asked{_how_it_stopped(attempt)}"
    elif totals.stopped_step is not None:
        step, saved = totals.stopped_step, returned.steps
        after = f"a checkpoint at step {step}" if saved and saved[0] == step else f"step {step}"
        state, how = RunState.CANCELLED, f"stopped after {after}"
    else:
        state, how = RunState.SUCCEEDED, "every rank is done"
    return state, "; ".join([how, *notes])


def _killed(attempt: Attempt) -> list[str]:
    forced = attempt.ledger.forced
    return [f"ranks {forced} did not end when asked and were killed"] if forced else []


def _how_it_stopped(attempt: Attempt) -> str:
    ledger, asked_s = attempt.ledger, attempt.asked_s
    ended = [rank.ended_s for rank in ledger.ranks.values() if rank.ended_s is not None]
    if ledger.forced or not asked_s or not ended:
        return "".join(f": {killed}" for killed in _killed(attempt))
    asked = {rank.asked for rank in ledger.ranks.values() if rank.asked}
    took_s = math.ceil(max(1.0, max(ended) - asked_s))
    if asked == {"Trainer"}:
        return f": its Trainer ended after a step, and its ranks by themselves within {took_s} s"
    return f": its ranks ended by themselves within {took_s} s{' of ' if asked else ''}{' and '.join(sorted(asked))}"


def _outputs(context: RunContext, brought: Brought) -> list[str]:
    match output_facts(context.paths):
        case {"output_files": int() as files, "output_bytes": int() as bytes_}:
            return [f"outputs/ has {counted(files, 'file')} ({size(bytes_)}) that it wrote", *brought.notes]
    return [*brought.notes]
