"""Continue a run after lost pods, killed ranks or the death of its keeper."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial

from workbench.base.clock import now_s
from workbench.base.errors import ConfigError, PodError, RemoteError, RunError, WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import Json, as_int, as_str
from workbench.jobs.launcher import Launcher
from workbench.keeper.checkpoints import PulledCheckpoints, newest_in_place
from workbench.keeper.launch import LauncherProcess
from workbench.keeper.link.agent import AgentLink, PodGone, stop_ranks
from workbench.keeper.link.context import RunContext, StopRequests
from workbench.keeper.link.in_place import remove_later, shared_steps
from workbench.keeper.resource_limits import call_into, start_thread
from workbench.keeper.run.policy import Loss
from workbench.keeper.run.stage import rank_request
from workbench.pods.pod import Pod
from workbench.rundir.checkpoints import Checkpoint
from workbench.rundir.events import Event, EventKind
from workbench.rundir.totals import RunTotals

_LOOK_S = 0.2
_MOVE = 'if [ -d "$1" ]; then rm -rf -- "$2" && mv -- "$1" "$2"; fi'
logger = logging.getLogger(__name__)
_PAUSE_S = 0.5
# Time for ranks of an earlier attempt to end.
_ENDED_S = 15.0
# Attempts that dead keepers may have begun without a line in the log, as the disk was full.
_MOST_UNRECORDED = 1000


def replace_lost_pods(
    context: RunContext, lost: Collection[str], requests: StopRequests
) -> Sequence[AgentLink] | None:
    """Replace lost pods and return the links to all pods. Return None if the run was cancelled.

    Pods that the platform ended after the watch of the run are replaced too.
    """
    ended = {pod.name for pod in context.refresh() if pod.phase.is_terminal}
    lost = {*lost, *(link.pod.name for link in context.links if link.pod.name in ended)}
    if not lost:
        return None if requests.cancel.is_set() else context.links
    task: Future[Mapping[str, str]] = Future()
    act = partial(call_into, task, partial(context.restore, lost))
    # The thread ends on its own, also after a cancel.
    start_thread(threading.Thread(target=act, name="restore"))
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
    totals: RunTotals,
    loss: Loss,
    returned: PulledCheckpoints,
) -> tuple[RunContext, Event]:
    """Prepare the attempt of the context on the given pods, from the newest good checkpoint.

    Return the context of the attempt, and the event of the restart.
    """
    if context.unstartable:
        raise RunError(context.unstartable)
    new = replace(
        context.on(links),
        inherited=False,
    )
    # A dead keeper may have rewritten the inputs for another number of ranks already.
    before = as_int(read_json(context.paths.job).get("ranks")) or len(context.places)
    last_step = totals.last_possible_step
    step, batch = context.spec.job.resumed(
        context.paths.root,
        gpus=context.spec.cluster.pods.gpus,
        before=before,
        ranks=len(new.places),
        last_step=last_step,
        newest=_newest_in_place(new, last_step),
    )
    if new.shared is not None and step is not None:
        remove_later(links[0], new.shared, shared_steps(links, new.shared), step)
    new.everywhere(partial(_make_ready, new, step=step))
    fresh = _why_fresh(totals.saved_step, step, returned)
    data: dict[str, object] = {
        "what": loss.what,
        "why": loss.why,
        "lost_step": totals.reached_step,
        "step": step,
    }
    if fresh:
        data["fresh"] = fresh
    data["pods"] = len(links)
    data["ranks"] = len(new.places)
    data["batch"] = batch
    data["lost_s"] = round(loss.lost_s, 3)
    return new, Event(time_s=now_s(), rank=None, kind=EventKind.RESTARTED, data=data)


def _newest_in_place(context: RunContext, last_step: int | None) -> Checkpoint | None:
    """Return the newest good checkpoint in the run's shared folder. None: no such."""
    if context.shared is None:
        return None
    for link in context.links:
        link.ensure()
    try:
        return newest_in_place(context.links, context.shared, last_step)
    except ConfigError as error:
        logger.warning("%s", error)
        return None


def _why_fresh(saved_step: int, step: int | None, returned: PulledCheckpoints) -> str:
    """Explain a restart from step 0 despite a saved checkpoint; "" for any other restart."""
    if step != 0 or not saved_step:
        return ""
    # A checkpoint needs the parts of all ranks, and a lost pod takes its part along.
    words = f"the checkpoint of step {saved_step} was not whole here yet when the loss was noticed"
    return "; ".join([words, *returned.notes])


def _make_ready(context: RunContext, link: AgentLink, *, step: int | None) -> None:
    """Remove the previous attempt's checkpoints from a pod, but for the parts of `step`.

    None: the program looks for its own checkpoints, and the place is unknown here.
    """
    pod = context.on_pod(link)
    link.ensure()
    if step is None:
        return
    removed = [str(pod.checkpoints), str(pod.stop)]
    if step:
        kept = str(pod.checkpoints / f"step-{step}")
        link.run(["sh", "-c", _MOVE, "sh", kept, str(pod.resume)])
    else:
        removed.append(str(pod.resume))
    link.run(["rm", "-rf", "--", *removed])


def end_earlier_ranks(context: RunContext) -> None:
    """End ranks of an earlier attempt, as far as their pods answer. Blocks, raises nothing."""
    stop_ranks(context.links, context.run_id)
    until = time.monotonic() + _ENDED_S
    while any(context.everywhere(partial(_is_alive, context))):
        if time.monotonic() > until:
            logger.warning("ranks of run %s have not ended", context.run_id)
            return
        time.sleep(_LOOK_S)


def _is_alive(context: RunContext, link: AgentLink) -> bool:
    """Whether processes of the run are known to be alive on a pod."""
    try:
        answer = link.call("poll", run=context.run_id, offsets={}, max_bytes=0)
    except RemoteError:
        return False
    return bool(answer.get("live_processes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class InheritedRanks:
    """Ranks of a dead keeper on the pods of a run."""

    launcher: LauncherProcess | None
    """Launcher of the ranks. None: the launcher has ended, or the agents started the ranks."""
    unwatched: bool
    """Whether ranks ended with their agent."""
    attempt: int
    """Number of the attempt of the ranks."""
    restart: int
    """Number of restarts before the attempt."""
    gone: PodGone | None = None
    """Loss of a pod before its ranks were found again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OnPod:
    """Answer of an agent about the ranks of a run."""

    phases: Sequence[str]
    inherited: bool
    attempt: int
    """Number of the attempt of the ranks. 0: unknown."""
    restart: int


def inherited_ranks(context: RunContext) -> InheritedRanks | None:
    """Find ranks that are already started. Blocks.

    Returns:
        The ranks. None: no rank has been started, and the run starts now.

    Raises:
        PodGone: A pod has ended, has been silent for a lease, or does not have the ranks.
        RunError: The run cannot start, or was already over.
    """
    answers = context.everywhere(partial(_ask, context))
    phases: set[str] = set()
    for answer in answers:
        phases.update(answer.phases)
    launcher = LauncherProcess.left_by_another(context.run_id, context.paths.launcher_log)
    decided = context.decided
    # The manifest is written once all ranks have ended.
    was_over = context.paths.manifest.exists() or (decided is not None and decided.brought)
    if not phases and was_over:
        raise RunError(
            "the keeper died after the run had ended and before the result was written; the pods"
            " have no record of the run any more, so the outcome is unknown. "
            f"Files of the run are in {context.paths.root}"
        )
    was_started = launcher is not None or (decided is not None and decided.started)
    if was_started or not phases <= {"waiting"}:
        _check_records(context, answers)
    if phases <= {"waiting"} and launcher is None:
        if context.unstartable:
            raise RunError(
                f"the keeper died before the ranks were started, and {context.unstartable}"
            )
        return None
    unwatched = any(answer.inherited for answer in answers)
    if "waiting" in phases and launcher is None:
        if unwatched or context.spec.job.launcher != Launcher.SSH.value:
            raise RunError("the keeper died during the start of the ranks, before all had started")
        context.everywhere(lambda link: link.call("start", run=context.run_id))
    newest = max(answers, key=lambda answer: answer.attempt)
    return InheritedRanks(
        launcher=launcher,
        unwatched=unwatched,
        attempt=max(newest.attempt, context.attempt),
        restart=max(newest.restart, context.restart),
    )


def _check_records(context: RunContext, answers: Sequence[_OnPod]) -> None:
    """Raise PodGone for a pod without the ranks of the newest attempt."""
    newest = context.attempt
    begun = f"attempt {newest} had begun"
    for link, answer in zip(context.links, answers, strict=True):
        if answer.attempt > newest:
            newest = answer.attempt
            begun = f"attempt {newest} had begun on {link.pod.name}"
    for link, answer in zip(context.links, answers, strict=True):
        name = link.pod.name
        why = ""
        if not answer.phases:
            why = f"{name} has no record of the run any more"
        elif answer.attempt and answer.attempt < newest:
            why = f"{name} has ranks of attempt {answer.attempt}, and {begun}"
        if why:
            raise PodGone(why, host=link.pod.address)


def _seen_pods(context: RunContext) -> Sequence[Pod]:
    """Return the pods as their platform sees them. Empty if the platform does not answer."""
    try:
        return context.refresh()
    except WorkbenchError as error:
        logger.warning("%s", error)
        return []


def _ask(context: RunContext, link: AgentLink) -> _OnPod:
    """Return the ranks of a run on a pod."""
    until = time.monotonic() + context.spec.cluster.lease_s
    while True:
        try:
            link.ensure()
            request = rank_request(context, link, (context.links[0].pod.address, 0))
            answer = link.call("rejoin", run=context.run_id, request=request)
            break
        except (RemoteError, PodError) as error:
            for pod in _seen_pods(context):
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
    return _on_pod(context, link, answer)


def _on_pod(context: RunContext, link: AgentLink, answer: Json) -> _OnPod:
    """Read the answer of an agent to `rejoin`. Raise PodGone for another form."""
    inherited = answer.get("inherited")
    phases = answer.get("phases")
    attempt = as_int(answer.get("attempt"))
    restart = as_int(answer.get("restart"))
    last = context.attempt + _MOST_UNRECORDED
    match phases, inherited, attempt, restart:
        case [*names], bool(), int(), int() if all(isinstance(name, str) for name in names):
            if 0 <= attempt <= last and 0 <= restart <= context.spec.job.restarts:
                return _OnPod(
                    phases=[as_str(name) for name in names],
                    inherited=inherited,
                    attempt=attempt,
                    restart=restart,
                )
    name = link.pod.name
    raise PodGone(
        f"the agent of {name} does not name the ranks of the run in an agent's form. "
        f"If {name} is trusted, start another cluster",
        host=link.pod.address,
    )
