"""Resume the queue of a dead keeper. Runs continue from their recorded state."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import gate, is_there, read_json, read_text, write_json
from workbench.base.process import boot_id
from workbench.base.redact import Redactor
from workbench.jobs.job import Job
from workbench.keeper.fleet import Fleet
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.runner import Runner
from workbench.pods.hostfile import Hostfile
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import ClusterSpec, RunSpec, resolved
from workbench.rundir.state import RunState
from workbench.rundir.status import ClusterStatus, QueuedRun, own_runs, read_queue, result_file

logger = logging.getLogger(__name__)


def wanted_pods(job: Job, pods: int | None, count: int) -> int:
    return job.rules.capped(count if pods is None else pods)


def run_context(
    fleet: Fleet,
    links: Sequence[AgentLink],
    run: QueuedRun,
    job: Job,
    redact: Redactor,
    *,
    inherited: bool = False,
    unstartable: str = "",
) -> RunContext:
    """Create the context of a run and write its hostfile."""
    redact.learn(job.env)
    context = RunContext(
        run_id=run.id,
        paths=RunPaths(run.path),
        spec=RunSpec(cluster=fleet.spec, job=job, pods=len(links)),
        identity=fleet.identity,
        refresh=fleet.refresh,
        restore=fleet.restore,
        redact=redact,
        spare=fleet.paths.results / f"{run.id}.json",
        inherited=inherited,
        unstartable=unstartable,
    )
    return context.on(links)


def inherited_runs(
    fleet: Fleet, redact: Redactor, before: ClusterStatus
) -> tuple[dict[str, Runner], dict[str, Mapping[str, object]]]:
    """Return the dead keeper's runs by id, in order, and the results of failed takeovers."""
    runners: dict[str, Runner] = {}
    failed: dict[str, Mapping[str, object]] = {}
    restarted = fleet.spec.is_local and before.boot not in ("", boot_id())
    own = own_runs(fleet.paths.root)
    for run in read_queue(fleet.paths.queue):
        info = RunPaths(run.path).info
        # A readable record naming another cluster belongs to a foreign run. Neither continue nor
        # end it.
        if read_json(info) and run not in own:
            logger.warning(
                "run %s in %s does not name this cluster, and is left alone", run.id, run.path
            )
            continue
        try:
            if not is_there(info):
                raise RunError(f"the directory {run.path} is gone or cannot be read")
            runners[run.id] = _inherited_run(fleet, run, redact, restarted=restarted)
        except Exception as error:  # Run boundary: later runs continue.
            logger.exception("run %s", run.id)
            failed[run.id] = _fail_inherited(fleet, run, error)
    return runners, failed


def _fail_inherited(fleet: Fleet, run: QueuedRun, error: Exception) -> Mapping[str, object]:
    """End a run that cannot be taken over, and return its result. Raises nothing.

    If no disk accepts the result, only the return value has it.
    """
    fleet.stop_ranks(run.id)
    message = f"the keeper died, and a new keeper cannot continue the run: {error}"
    place = str(run.path)
    result = {"state": RunState.FAILED, "message": message, "of": place}
    # No reader looks for a result there.
    if not is_there(run.path):
        return result
    paths = RunPaths(run.path)
    try:
        before = read_json(result_file(paths))
        if before:
            return {**before, "of": place}
        write_json(paths.result, result)
    except OSError as why:
        logger.warning("cannot write the result of %s: %s", run.id, why)
        try:
            results = fleet.paths.results
            gate.make_folders(results, fleet.paths.root)
            write_json(results / f"{run.id}.json", result)
        except (OSError, WorkbenchError) as again:
            logger.error(
                "cannot write the result of %s to the cluster's directory either: %s", run.id, again
            )
    return result


def _inherited_run(fleet: Fleet, run: QueuedRun, redact: Redactor, *, restarted: bool) -> Runner:
    paths = RunPaths(run.path)
    job = RunSpec.load(paths.spec).job
    unstartable = _missing_variables(fleet.paths, fleet.spec)
    try:
        job = resolved(job)
    except ConfigError as error:  # Running ranks already have their variables.
        unstartable = str(error)
    hostfile = Hostfile.parse(read_text(paths.hostfile), source=str(paths.hostfile))
    context = run_context(
        fleet,
        fleet.at(hostfile.addresses),
        run,
        job,
        redact,
        inherited=True,
        unstartable=unstartable,
    )
    return Runner(replace(context, restarted=restarted))


def _missing_variables(paths: ClusterPaths, spec: ClusterSpec) -> str:
    pods: object = read_json(paths.config).get("pods")
    match pods:
        case {"env": dict() as env} if missing := sorted(env.keys() - spec.pods.env.keys()):
            return (
                f"{', '.join(missing)}: variables of the cluster's pods,"
                " not set where the cluster was taken over"
            )
    return ""
