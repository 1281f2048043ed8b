"""The end that a platform sets for the pods of a run, beside the run's own pace.

The pace is measured from the run's steps, or from an earlier run of the same job, finished or not.
Nothing is predicted from the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.words import duration, moment
from workbench.pods.pod import Pod
from workbench.rundir.catalog.store import find_runs
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import result_file
from workbench.rundir.totals import Progress, TotalsTail

_LOOKED_AT = 50
"""Number of earlier runs that are compared with a submitted job."""
_MOMENT = "%Y-%m-%d %H:%M"
_ADVICE = (
    "Start a cluster with a later deadline (deadline_s on Kubernetes, time on Slurm), and continue"
    " the run from a checkpoint"
)


def end_of(pods: Sequence[Pod]) -> float | None:
    """Return when the platform ends the first pod, in seconds since the epoch. None: unknown."""
    return min((pod.ends_s for pod in pods if pod.ends_s is not None), default=None)


def early_end(progress: Progress, saved_step: int, ends_s: float | None, now_s: float) -> str:
    """Return that the pods end before the run, with the step that will be reached, or nothing.

    Without a pace of the run so far, only the end is known.
    """
    if ends_s is None or progress.state.is_terminal:
        return ""
    ends = f"the pods end at {moment(ends_s, _MOMENT)}, in {duration(max(0.0, ends_s - now_s))}"
    left_s = progress.eta_s
    if left_s is None:
        return f"{ends}; the pace of the run is unknown until its first steps"
    if now_s + left_s < ends_s:
        return ""
    steps = ""
    if progress.step is not None and progress.max_steps is not None and left_s > 0:
        share = max(0.0, ends_s - now_s) / left_s
        reached = progress.step + int((progress.max_steps - progress.step) * share)
        steps = f", about step {reached} of {progress.max_steps}"
    last = f"the last checkpoint is of step {saved_step}" if saved_step else "no checkpoint so far"
    return f"{ends}{steps}, before this run with {duration(left_s)} left; {last}. {_ADVICE}"


def too_late(spec: RunSpec, own: RunPaths, runs: Path, ends_s: float, now_s: float) -> str:
    """Return that the same job takes longer than the pods last, by an earlier run, or nothing."""
    newest_first = sorted(find_runs(runs), key=lambda each: each.root.name, reverse=True)
    for paths in newest_first[:_LOOKED_AT]:
        if paths.root == own.root or not result_file(paths).exists():
            continue
        took_s = None
        # A run of another version or with damaged files is no measure.
        with suppress(WorkbenchError, ValueError):
            if _work_of(RunSpec.load(paths.spec, of_run=True)) == _work_of(spec):
                result = ResultRecord.load(paths.root)
                took_s = _whole_time_s(result, paths)
        if took_s is not None:
            if now_s + took_s < ends_s:
                return ""
            return (
                f"the pods end at {moment(ends_s, _MOMENT)}, in {duration(ends_s - now_s)}, and the"
                f" same job takes {duration(took_s)} at the pace of {paths.root.name}. {_ADVICE}"
            )
    return ""


def _whole_time_s(result: ResultRecord, paths: RunPaths) -> float | None:
    """Return the time of all steps of a run, at its pace if it was not finished. None: no pace."""
    if result.state is RunState.SUCCEEDED or result.duration_s is None:
        return result.duration_s
    progress = TotalsTail(paths.events).read().progress(result.state, "")
    if not progress.step or not progress.max_steps:
        return None
    first = result.resumed_step or 0
    done = progress.step - first
    return result.duration_s * (progress.max_steps - first) / done if done > 0 else None


def _work_of(spec: RunSpec) -> tuple[int, Mapping[str, object]]:
    """Return ranks and options of a job. A run's directory has no secrets, so `env` is left out."""
    return spec.world_size, {**spec.job.to_dict(), "env": None}
