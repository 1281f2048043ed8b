"""Resume the queue of a dead keeper. Runs continue from their recorded state."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import is_there, read_json, read_text, write_json
from workbench.base.process import boot_id
from workbench.base.redact import Redactor
from workbench.jobs.job import Job
from workbench.keeper.boundary import isolate_run_errors
from workbench.keeper.decisions import DecisionLog
from workbench.keeper.fleet import Fleet
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.keeper.run.attempt import AttemptDeps
from workbench.keeper.run.runner import Runner
from workbench.pods.hostfile import Hostfile
from workbench.rundir.paths import RunPaths
from workbench.rundir.register.registered import (
    is_run_of,
)
from workbench.rundir.register.store import DecisionKind, KnownRun
from workbench.rundir.spec import ClusterSpec, RunSpec, resolved
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    ClusterStatus,
    has_result,
    result_file,
)
from workbench.rundir.stores.address import secrets_of

logger = logging.getLogger(__name__)


def wanted_pods(job: Job, pods: int | None, count: int) -> int:
    return job.rules.capped(count if pods is None else pods)


def run_context(
    fleet: Fleet,
    links: Sequence[AgentLink],
    run: KnownRun,
    job: Job,
    redact: Redactor,
    log: DecisionLog,
    *,
    pods: int | None = None,
    inherited: bool = False,
    unstartable: str = "",
    store_environment: Mapping[str, str] | None = None,
) -> RunContext:
    """Create the context of a run, and write its hostfile if its pods are known.

    `pods` is the number of pods; None: the number of links.
    """
    context = RunContext(
        run_id=run.id,
        paths=RunPaths(run.path),
        spec=RunSpec(cluster=fleet.spec, job=job, pods=pods or len(links)),
        identity=fleet.identity,
        refresh=fleet.refresh,
        restore=fleet.restore,
        redact=redact.of_run(job.env, secrets_of(store_environment or {})),
        log=log,
        spare=fleet.paths.results / f"{run.id}.json",
        inherited=inherited,
        unstartable=unstartable,
        store_environment=store_environment or {},
    )
    return context.on(links) if links else context


def inherited_runs(
    fleet: Fleet,
    redact: Redactor,
    before: ClusterStatus,
    log: DecisionLog,
    around: AttemptDeps | None = None,
) -> tuple[dict[str, Runner], dict[str, Mapping[str, object]]]:
    """Return the dead keeper's runs by id, in order, and the results of runs without a runner.

    A run whose submission was never written, as the disk was full, is not among them.
    """
    runners: dict[str, Runner] = {}
    failed: dict[str, Mapping[str, object]] = {}
    restarted = fleet.spec.is_local and before.boot not in ("", boot_id())
    for run in [KnownRun(id=name, path=run.path) for name, run in log.runs.items()]:
        with isolate_run_errors(run.id, "reading the record of the run"):
            # A readable record naming another cluster belongs to a foreign run. Neither continue
            # nor end it.
            if read_json(RunPaths(run.path).info) and not is_run_of(run, fleet.paths.root):
                logger.warning(
                    "run %s in %s does not name this cluster, and is left alone", run.id, run.path
                )
                continue

        def end(error: Exception, run: KnownRun = run) -> None:
            failed[run.id] = _fail_inherited(fleet, run, log, error)

        with isolate_run_errors(run.id, "taking the run over", end=end):
            result = _outcome_without_file(run, log)
            if result:
                failed[run.id] = _keep_result(fleet, run, result)
                continue
            if not is_there(RunPaths(run.path).info):
                raise RunError(f"the directory {run.path} is gone or cannot be read")
            runners[run.id] = _inherited_run(
                fleet, run, redact, log, around=around, restarted=restarted
            )
    return runners, failed


def _outcome_without_file(run: KnownRun, log: DecisionLog) -> Mapping[str, object]:
    """Return the outcome of a run that is over, if no file has its result. Empty: another run."""
    decided = log.of(run.id)
    if decided is None or not decided.over or has_result(RunPaths(run.path)):
        return {}
    return decided.outcome


def _fail_inherited(
    fleet: Fleet, run: KnownRun, log: DecisionLog, error: Exception
) -> Mapping[str, object]:
    """End a run that cannot be taken over, and return its result. Raises nothing."""
    fleet.stop_ranks(run.id)
    message = f"the keeper died, and a new keeper cannot continue the run: {error}"
    log.add(run.id, DecisionKind.ENDED, state=RunState.FAILED, message=message)
    outcome = {"state": RunState.FAILED, "message": message}
    return _keep_result(fleet, run, outcome)


def _keep_result(
    fleet: Fleet, run: KnownRun, outcome: Mapping[str, object]
) -> Mapping[str, object]:
    """Write the result of a run without a runner, unless the run has a result. Raises nothing.

    If no disk accepts the result, only the return value has it.
    """
    place = str(run.path)
    result = {"state": outcome["state"], "message": outcome.get("message"), "of": place}
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
            results.mkdir(mode=0o700, exist_ok=True)
            write_json(results / f"{run.id}.json", result)
        except (OSError, WorkbenchError) as again:
            logger.error(
                "cannot write the result of %s to the cluster's directory either: %s", run.id, again
            )
    return result


def _inherited_run(
    fleet: Fleet,
    run: KnownRun,
    redact: Redactor,
    log: DecisionLog,
    *,
    around: AttemptDeps | None,
    restarted: bool,
) -> Runner:
    paths = RunPaths(run.path)
    job = RunSpec.load(paths.spec).job
    unstartable = _missing_variables(log.registration.spec, fleet.spec)
    try:
        job = resolved(job)
    except ConfigError as error:  # Running ranks already have their variables.
        unstartable = str(error)
    context = run_context(
        fleet,
        _links_of(fleet, run, log),
        run,
        job,
        redact,
        log,
        inherited=True,
        unstartable=unstartable,
    )
    return Runner(replace(context, restarted=restarted), around)


def _links_of(fleet: Fleet, run: KnownRun, log: DecisionLog) -> list[AgentLink]:
    """Return the links to the pods of a run, by their names in the log of decisions.

    A replaced pod has the same name, and may have another address than in the run's hostfile.
    """
    decided = log.of(run.id)
    if decided is not None and decided.pods:
        links = fleet.named(decided.pods)
        if len(links) == len(decided.pods):
            return links
    # The log names no pods.
    hostfile = RunPaths(run.path).hostfile
    known = Hostfile.parse(read_text(hostfile), source=str(hostfile))
    return fleet.at(known.addresses)


def _missing_variables(stored: Mapping[str, object], spec: ClusterSpec) -> str:
    match stored.get("pods"):
        case {"env": dict() as env} if missing := sorted(env.keys() - spec.pods.env.keys()):
            return (
                f"{', '.join(missing)}: variables of the cluster's pods,"
                " not set where the cluster was taken over"
            )
    return ""
