"""Whom to blame for the end of an attempt where no rank failed by itself: a pod, the network, another process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from workbench.base.errors import RemoteError
from workbench.jobs.finetune import Job
from workbench.jobs.script import Script
from workbench.keeper.link.agent import PodGone
from workbench.keeper.link.context import RunContext
from workbench.keeper.watch.ledger import CUT_OFF, RunLedger
from workbench.rundir.outcome import fold_failures
from workbench.rundir.result import RunFault


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
    """Return a fault whose traceback names a script's files where its user has them, not the copies on the pods.

    Example:
        >>> fault = RunFault(traceback='File "/pod-0/runs/r1/script/lib/data.py", line 3')
        >>> in_users_files("r1", Script("/home/me/train.py"), fault).traceback
        'File "/home/me/lib/data.py", line 3'
    """
    match job:
        case Script() if fault is not None:
            script = Path(job.path)
            # With `${NAME}` in its arguments a script is run by its bare name.
            copy = rf'(?<=File ")([^"]*/{re.escape(run_id)}/script/|(?={re.escape(script.name)}"))'
            return replace(fault, traceback=re.sub(copy, lambda _: f"{script.parent}/", fault.traceback))
    return fault


def lost_pod(context: RunContext, ledger: RunLedger) -> RunFault:
    """Blame the first pod that is lost, or the network where none of several answers."""
    name, why = next(iter(ledger.lost.items()))
    if len(ledger.pods) > 1 and not ledger.heard_within(context.spec.cluster.lease_s / 2):
        return RunFault(kind="network", message=f"no sign from any pod: {CUT_OFF}; {why}")
    address = next(link.pod.address for link in context.links if link.pod.name == name)
    fault = RunFault(pod=name, host=address, kind="pod", message=why)
    return replace(fault, others=fold_failures(ledger.ranks.values()))


def stopped_by_others(ledger: RunLedger, context: RunContext, *, unwatched: bool) -> RunFault:
    """Blame the end of an agent, which took a rank along; `unwatched` where no keeper was there."""
    stopped = next(rank for rank in ledger.ranks.values() if not rank.done)
    why = "was ended together with the agent of its pod, and not by this run's keeper"
    if unwatched:
        why = "was ended when its keeper had died and no other was there within the lease of its pod's agent"
        if context.restarted:
            why = "ended with its pod when this machine was started again"
    return RunFault(host=stopped.pod.address, pod=stopped.pod.name, rank=stopped.rank, kind="pod", message=why)
