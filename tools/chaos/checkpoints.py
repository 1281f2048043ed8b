"""Small trainings whose ranks, agents, pods or keeper are killed, and that continue as saved."""

from __future__ import annotations

import random
import time
import traceback

from tests.support.poll import until
from tools.chaos.keepers import take_over
from tools.chaos.kills import hit, outcome_of
from tools.chaos.numbered import END_S
from tools.chaos.plan import Trial
from tools.chaos.site import Site, left_of_run
from tools.chaos.tally import Outcome
from workbench import FineTune, Run
from workbench.base.errors import WorkbenchError
from workbench.rundir.state import RunState

_STEPS = 90
_PARTS = 2
_PATIENCE_S = 120.0


def checkpoint(site: Site, trial: Trial) -> Outcome:
    """Kill a training some time after its first checkpoint, and go on from the newest."""
    chance, outcome = random.Random(trial.number), outcome_of(trial)
    cluster = site.cluster()
    pod = chance.choice(list(cluster.pods))
    keep = "bring" if trial.victim == "worker" else chance.choice(["pod", "bring"])
    run = cluster.submit(_job(trial.phase, checkpoints=keep))
    until(lambda: _saved(run, keep) or run.state.is_terminal, _PATIENCE_S)
    time.sleep(chance.uniform(0, 1.0))
    hit(trial, cluster, pod, run, outcome)
    killed = time.monotonic()
    until(lambda: run.state.is_terminal, END_S)
    shown_s = time.monotonic() - killed
    if trial.victim == "keeper" and (new := take_over(cluster)) is not None:
        site.replace(new)
    result = run.wait(_PATIENCE_S, progress=False)
    outcome.state, outcome.message = str(result.state), result.message[:500]
    outcome.shown_s = None if result.state is RunState.SUCCEEDED else shown_s
    outcome.taken_over = trial.victim == "keeper" and result.state is RunState.SUCCEEDED
    if trial.victim == "rank" and result.state is RunState.FAILED:
        right = result.error is not None and result.error.pod == pod.name
        outcome.cause = "named" if right else "wrong" if result.error is not None else "missing"
    elif result.state is not RunState.SUCCEEDED:
        named = trial.victim == "keeper" or pod.name in f"{result.error}"
        outcome.cause = "named" if named else "missing" if result.error is None else "wrong"
    outcome.orphans += left_of_run(run.id, 20)
    if trial.victim in ("worker", "keeper"):  # a new keeper has no fork server
        outcome.orphans += site.give_up()
    if result.state is not RunState.SUCCEEDED:
        _prepare_restart(site, trial, run, keep, outcome)
    return outcome


def _job(technique: str, **more: object) -> FineTune:
    options = {
        "dataset": {"kind": "wikisql-mini", "train_rows": 60, "eval_rows": 2},
        "technique": technique,
        "max_steps": _STEPS,
        "per_device_train_batch_size": 2,
        "predict_rows": 0,
        "profile_step": 0,
        "save_steps": 2,
    }
    return FineTune(**{**options, **more})  # type: ignore[arg-type]


def _saved(run: Run, keep: str) -> list[int]:
    """Return the steps that are safe by promise: on the pods, or here where they were to come."""
    if keep == "bring":
        steps = run.paths.checkpoints.glob("step-*")
        return [1 for path in steps if len(list(path.glob("pod-*/rank-*/manifest.json"))) == _PARTS]
    return [1 for event in run.events() if event.kind == "checkpoint"]


def _prepare_restart(site: Site, trial: Trial, run: Run, keep: str, outcome: Outcome) -> None:
    saved = _saved(run, keep)
    try:
        resumed = site.cluster().submit(_job(trial.phase, resume=str(run.path), save_steps=None))
        result = resumed.wait(_PATIENCE_S, progress=False)
        good = result.state is RunState.SUCCEEDED and result.resumed_step is not None
        why = result.message
        outcome.orphans += left_of_run(resumed.id)
    except WorkbenchError:
        good, why = False, traceback.format_exc(limit=1)
    outcome.unusable = bool(saved) and not good
    if outcome.unusable:
        outcome.message += f"; resume: {why}"[:500]
