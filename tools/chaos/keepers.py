"""The keeper is killed, and a new one takes its cluster and its run over."""

from __future__ import annotations

import random
import time

from tests.support.poll import until
from tools.chaos.kills import hit, judge, outcome_of
from tools.chaos.numbered import END_S, submit
from tools.chaos.plan import Trial
from tools.chaos.site import LEASE_S, Site, left_of_run
from tools.chaos.tally import Outcome
from workbench import Cluster
from workbench.base.errors import WorkbenchError
from workbench.rundir.state import RunState


def take_over(cluster: Cluster) -> Cluster | None:
    """Let a new keeper continue a dead one's cluster; None where it cannot: the run is lost."""
    try:
        return Cluster.attach(cluster.path)
    except WorkbenchError:
        return None


def keeper_death(site: Site, trial: Trial) -> Outcome:
    """Kill the keeper amid a run; the run is to succeed with every line, even by a late keeper."""
    chance, outcome = random.Random(trial.number), outcome_of(trial)
    cluster = site.cluster()
    late, sending = trial.phase == "late", trial.phase == "sending"
    numbered = submit(
        cluster,
        site.folder,
        lines=50 if late else 100,
        payload_mib=3.0 if sending else 0.0,
        launcher=trial.launcher,
    )
    numbered.reach("running" if late else trial.phase, chance)
    victim = hit(trial, cluster, cluster.pods[0], None, outcome)
    killed = time.monotonic()
    until(lambda: numbered.run.state is RunState.LOST or numbered.run.state.is_terminal, END_S)
    outcome.shown_s = time.monotonic() - killed
    time.sleep(LEASE_S + 2 if late else chance.uniform(0, LEASE_S / 4))
    new = take_over(cluster)
    if new is not None:
        site.replace(new)
    result = numbered.end()
    judge(outcome, numbered, result, pod=cluster.pods[0], victim=victim, outlives=not sending)
    outcome.taken_over = new is not None and bool(victim) and outcome.state == "succeeded"
    if new is None or late or outcome.state != "succeeded" or chance.random() < 0.2:
        outcome.orphans += site.give_up()
    outcome.orphans += left_of_run(numbered.run.id, LEASE_S + 10)
    return outcome
