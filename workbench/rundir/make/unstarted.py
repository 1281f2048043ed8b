"""Write the result of a run that never started."""

from __future__ import annotations

import warnings

from workbench.base.clock import now_s
from workbench.base.files import write_json
from workbench.base.redact import Redactor
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord, RunFault, submitted_rows
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState


def keep_reason(paths: RunPaths, spec: RunSpec, error: Exception) -> None:
    """Write the result of a run that never started; warn if the disk does not take the result."""
    try:
        fail_unstarted(paths, spec, error)
    except OSError as why:
        lost = f"{paths.root} does not hold the reason why the run did not start: {why}"
        warnings.warn(lost, RuntimeWarning, stacklevel=3)


def fail_unstarted(paths: RunPaths, spec: RunSpec, error: Exception) -> None:
    """Write the result of a run that never started, with the reason. Raise OSError on failure."""
    redact = Redactor(spec.cluster.pods.env, spec.job.env)
    message = f"the run did not start: {error}"
    ended_s = now_s()
    record = ResultRecord.at(
        paths.root,
        {
            **spec.job.views.facts,
            **submitted_rows(paths),
            "duration_s": 0.0,
            "state": RunState.FAILED,
            "message": message,
            "error": RunFault(kind=type(error).__name__, message=str(error)),
            "started_s": ended_s,
            "ended_s": ended_s,
        },
    )
    paths.reserve.unlink(missing_ok=True)
    write_json(paths.result, redact.json(record.to_dict()))
    state = {"state": RunState.FAILED, "message": message, "time_s": ended_s}
    write_json(paths.state, redact.json(state))
