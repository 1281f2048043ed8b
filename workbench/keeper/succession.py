"""What a keeper goes on with that takes over from one that died: the runs in its queue, each as far as it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from workbench.base.errors import ConfigError
from workbench.base.files import read_json, read_text, write_json
from workbench.base.process import boot_id
from workbench.base.redact import Redactor
from workbench.jobs.finetune import Job
from workbench.keeper.fleet import Fleet
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext, is_single
from workbench.keeper.run.runner import Runner
from workbench.pods.hostfile import Hostfile
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec, resolved
from workbench.rundir.state import RunState
from workbench.rundir.status import ClusterStatus, QueuedRun, own_runs, read_queue, result_file

logger = logging.getLogger(__name__)


def wanted_pods(job: Job, pods: int | None, count: int) -> int:
    return 1 if is_single(job) else count if pods is None else pods


def run_context(
    fleet: Fleet,
    links: Sequence[AgentLink],
    run: QueuedRun,
    job: Job,
    redact: Redactor,
    *,
    left: bool = False,
    unstartable: str = "",
) -> RunContext:
    """Make what a run is carried out with, and write its hostfile."""
    redact.learn(job.env)
    context = RunContext(
        run_id=run.id,
        paths=RunPaths(run.path),
        spec=RunSpec(cluster=fleet.spec, job=job, pods=len(links)),
        identity=fleet.identity,
        look=fleet.look,
        restore=fleet.restore,
        redact=redact,
        spare=fleet.paths.results / f"{run.id}.json",
        left=left,
        unstartable=unstartable,
    )
    return context.on(links)


def left_runners(fleet: Fleet, redact: Redactor, before: ClusterStatus) -> dict[str, Runner]:
    """Return the runs of the keeper before, in order, by id; one that cannot be read has ended then, and says why."""
    runners = {}
    restarted = fleet.spec.is_local and before.boot not in ("", boot_id())
    own = own_runs(fleet.paths.root)
    for run in read_queue(fleet.paths.queue):
        if RunPaths(run.path).info.exists() and run not in own:
            logger.warning("run %s in %s does not name this cluster, and is left alone", run.id, run.path)
            continue
        if not RunPaths(run.path).info.exists():
            logger.warning("run %s is gone from %s", run.id, run.path)
            continue
        try:
            runners[run.id] = _left_runner(fleet, run, redact, restarted=restarted)
        except Exception as error:  # run boundary: the runs after it go on
            logger.exception("run %s", run.id)
            if not result_file(RunPaths(run.path)).exists():
                message = f"its keeper died, and another cannot go on with it: {error}"
                write_json(RunPaths(run.path).result, {"state": RunState.FAILED, "message": message})
    return runners


def _left_runner(fleet: Fleet, run: QueuedRun, redact: Redactor, *, restarted: bool) -> Runner:
    asked = RunSpec.load(RunPaths(run.path).spec)
    job, unstartable = asked.job, _missing_variables(fleet.paths, fleet.spec)
    try:
        job = resolved(job)
    except ConfigError as error:  # what runs already has its variables
        unstartable = str(error)
    hostfile = RunPaths(run.path).hostfile
    links = fleet.at(Hostfile.parse(read_text(hostfile), source=str(hostfile)).addresses)
    context = run_context(fleet, links, run, job, redact, left=True, unstartable=unstartable)
    return Runner(replace(context, restarted=restarted))


def _missing_variables(paths: ClusterPaths, spec: ClusterSpec) -> str:
    pods: object = read_json(paths.config).get("pods")
    match pods:
        case {"env": dict() as env} if missing := sorted(env.keys() - spec.pods.env.keys()):
            return f"{', '.join(missing)}, which the cluster's pods were given, are not set where it was taken over"
    return ""
