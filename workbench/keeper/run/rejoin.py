"""Find the ranks that a keeper which died had started, on pods and through a launcher that may live on."""

from __future__ import annotations

import logging
import time

from workbench.base.errors import PodError, RemoteError, RunError
from workbench.jobs.choices import Launcher
from workbench.keeper.launch.process import LauncherProcess
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.stage import rank_request

logger = logging.getLogger(__name__)
_PAUSE_S = 0.5


def ranks_left(context: RunContext) -> tuple[LauncherProcess | None, bool] | None:
    """Find started ranks again: the launcher unless it has ended, and whether some ended with their agent. Blocks."""
    answers = context.everywhere(lambda link: _ask(context, link))
    phases = {phase for each, _ in answers for phase in each}
    unwatched = any(ended for _, ended in answers)
    launcher = LauncherProcess.left_by_another(context.run_id, context.paths.launcher_log)
    if phases <= {"waiting"} and launcher is None:
        if context.unstartable:
            raise RunError(f"its keeper died before its ranks were started, and {context.unstartable}")
        return None
    if "waiting" in phases and launcher is None:
        if unwatched or context.spec.job.launcher != Launcher.SSH:
            raise RunError("its keeper died while its ranks were being started, and not all of them had been")
        context.everywhere(lambda link: link.call("start", run=context.run_id))
    return launcher, unwatched


def _ask(context: RunContext, link: AgentLink) -> tuple[list[str], bool]:
    """Return the phases of a pod's ranks, and whether they ended with their agent."""
    until = time.monotonic() + context.spec.cluster.lease_s
    while True:
        try:
            link.ensure()
            request = rank_request(context, link, (context.links[0].pod.address, 0))
            answer = link.call("rejoin", run=context.run_id, request=request)
            return answer["phases"], answer["left"]
        except (RemoteError, PodError) as error:
            ended = next((p for p in context.look() if p.name == link.pod.name and p.phase.is_terminal), None)
            if ended is not None:
                raise PodError(f"{ended.name} is {ended.phase}: {ended.message}") from error
            if time.monotonic() > until:
                raise
            logger.warning("%s", error)
        time.sleep(_PAUSE_S)
