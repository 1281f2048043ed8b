"""Continue a run after lost pods, killed ranks or the death of its keeper."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

from workbench.base.clock import now_s
from workbench.base.errors import PodError, RemoteError, RunError
from workbench.jobs.launcher import Launcher
from workbench.keeper.checkpoints import Returned
from workbench.keeper.launch import LauncherProcess
from workbench.keeper.link.agent import AgentLink, PodGone
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.run.stage import LOG_STREAMS, rank_request
from workbench.keeper.watch.ledger import RunLedger
from workbench.rundir.events import Event, EventKind
from workbench.rundir.result import RunFault

_KILLED = ("killed by SIGKILL", "killed by SIGTERM")
"""Exact messages. A longer message (out of memory) means a job that would fail again."""
_LOOK_S = 0.2
logger = logging.getLogger(__name__)
_PAUSE_S = 0.5


def pods_lost(ledger: RunLedger, fault: RunFault) -> set[str]:
    lost = set(ledger.lost)
    if fault.kind == "pod":
        lost.add(fault.pod)
    return lost


def describe_loss(ledger: RunLedger, fault: RunFault) -> str:
    """Describe the loss of an attempt. Return an empty string if the job itself ended it.

    Example:
        >>> fault = RunFault(kind="signal", rank=1, pod="pod-1", message="killed by SIGKILL")
        >>> describe_loss(RunLedger(pods=[], world_size=2), fault)
        'rank 1 on pod-1 was killed by SIGKILL'
    """
    lost = sorted(pods_lost(ledger, fault))
    if lost:
        return f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost"
    if fault.kind == "signal" and fault.message in _KILLED:
        return f"rank {fault.rank} on {fault.pod} was {fault.message}"
    return ""


def replace_lost_pods(
    context: RunContext, lost: Collection[str], requests: StopRequests
) -> Sequence[AgentLink] | None:
    """Replace lost pods and return the links to all pods. Return None if the run was cancelled."""
    if not lost:
        return None if requests.cancel.is_set() else context.links
    pool = ThreadPoolExecutor(max_workers=1)
    task = pool.submit(context.restore, lost)
    pool.shutdown(wait=False)  # The thread ends on its own.
    while not requests.cancel.is_set():
        if wait([task], timeout=_LOOK_S).done:
            left = task.result()
            if len(left) == len(context.links):
                raise RunError("; ".join(left.values()))
            return [link for link in context.links if link.pod.name not in left]
    return None


def restart_on(
    context: RunContext,
    links: Sequence[AgentLink],
    ledger: RunLedger,
    loss: tuple[str, float, RunFault],
    returned: Returned,
) -> tuple[RunContext, Event]:
    """Restart a run on the given pods from the newest good checkpoint. Return the restart event."""
    ranks = len(context.places)
    totals = ledger.totals
    new = replace(context.on(links), restart=context.restart + 1, inherited=False)
    step, batch = context.spec.job.resumed(
        context.paths.root,
        gpus=context.spec.cluster.pods.gpus,
        before=ranks,
        ranks=len(new.places),
        last_step=totals.last_possible_step,
    )
    new.everywhere(partial(_make_ready, new, resumes=step is not None))
    what, lost_s, fault = loss
    fresh = _why_fresh(totals.saved_step, step, returned)
    data: dict[str, object] = {
        "what": what,
        "why": fault.message,
        "lost_step": totals.reached_step,
        "step": step,
    }
    if fresh:
        data["fresh"] = fresh
    data["pods"] = len(links)
    data["ranks"] = len(new.places)
    data["batch"] = batch
    data["lost_s"] = round(lost_s, 3)
    return new, Event(time_s=now_s(), rank=None, kind=EventKind.RESTARTED, data=data)


def _why_fresh(saved_step: int, step: int | None, returned: Returned) -> str:
    """Explain a restart from step 0 despite a saved checkpoint; "" for any other restart."""
    if step != 0 or not saved_step:
        return ""
    # A checkpoint needs the parts of all ranks, and a lost pod takes its part along.
    words = f"the checkpoint of step {saved_step} was not whole here yet when the loss was noticed"
    return "; ".join([words, *returned.notes])


def _make_ready(context: RunContext, link: AgentLink, *, resumes: bool) -> None:
    """Remove the previous attempt's checkpoints from a pod and copy the rank logs there.

    The ranks append to these logs.
    """
    pod = context.on_pod(link)
    paths = context.paths
    link.ensure()
    # Otherwise the program looks for its own checkpoints, and their place is unknown.
    if resumes:
        removed = [str(path) for path in (pod.checkpoints, pod.resume, pod.stop)]
        link.run(["rm", "-rf", "--", *removed])
    for rank in context.ranks_on(link):
        folder = pod.rank(rank)
        link.run(["mkdir", "-p", "-m", "700", "--", str(pod.root), str(folder)])
        for stream in LOG_STREAMS:
            here = paths.rank_log(rank, stream)
            if here.exists() and here.stat().st_size:
                there = folder / f"{stream}.log"
                link.put_file(here, str(there))


def inherited_ranks(context: RunContext) -> tuple[LauncherProcess | None, bool] | None:
    """Find ranks that are already started. Blocks.

    Returns:
        The launcher (None if ended), and whether ranks ended with their agent.
        None instead of the pair: no rank has been started, and the run starts now.

    Raises:
        PodGone: A pod has ended, or has been silent for a lease.
        RunError: The run cannot start, or was already over.
    """
    phases: set[str] = set()
    unwatched = False
    for on_pod, ended in context.everywhere(partial(_ask, context)):
        phases.update(on_pod)
        unwatched = unwatched or ended
    launcher = LauncherProcess.left_by_another(context.run_id, context.paths.launcher_log)
    if not phases and context.paths.manifest.exists():  # Written once all ranks have ended.
        raise RunError(
            "the keeper died after the run had ended and before the result was written; the pods"
            " have no record of the run any more, so the outcome is unknown. "
            f"Files of the run are in {context.paths.root}"
        )
    if phases <= {"waiting"} and launcher is None:
        if context.unstartable:
            raise RunError(
                f"the keeper died before the ranks were started, and {context.unstartable}"
            )
        return None
    if "waiting" in phases and launcher is None:
        if unwatched or context.spec.job.launcher != Launcher.SSH:
            raise RunError("the keeper died during the start of the ranks, before all had started")
        context.everywhere(lambda link: link.call("start", run=context.run_id))
    return launcher, unwatched


def _ask(context: RunContext, link: AgentLink) -> tuple[list[str], bool]:
    """Return the phases of a pod's ranks, and whether ranks ended with their agent."""
    until = time.monotonic() + context.spec.cluster.lease_s
    while True:
        try:
            link.ensure()
            request = rank_request(context, link, (context.links[0].pod.address, 0))
            answer = link.call("rejoin", run=context.run_id, request=request)
            # An agent of an earlier version names the fact "left".
            name = "inherited" if "inherited" in answer else "left"
            return answer["phases"], answer[name]
        except (RemoteError, PodError) as error:
            for pod in context.refresh():
                if pod.name == link.pod.name and pod.phase.is_terminal:
                    raise PodGone(
                        f"{pod.name} is {pod.phase}: {pod.message}", host=link.pod.address
                    ) from error
            if time.monotonic() > until:
                lease_s = context.spec.cluster.lease_s
                why = f"no sign from {link.pod.name} for {lease_s:.0f} s: {error}"
                raise PodGone(why, host=link.pod.address) from error
            logger.warning("%s", error)
        time.sleep(_PAUSE_S)
