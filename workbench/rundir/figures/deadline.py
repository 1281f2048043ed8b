"""The end that a platform sets for the pods of a run, beside the run's own pace.

The pace is measured from the run's steps, or from an earlier run of the same job, finished or not.
Nothing is predicted from the model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.words import duration, moment, scaled
from workbench.pods.pod import Pod
from workbench.rundir.catalog.find import find_runs
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import ResultRecord
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import has_result
from workbench.rundir.totals import Progress, RunTotals, TotalsTail

logger = logging.getLogger(__name__)
_LOOKED_AT = 50
"""Number of earlier runs that are compared with a submitted job."""
_LINK_BITS_PER_S = 1e9
"""Link of a slow site. No link is measured before a run."""
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


def said_at_submit(
    spec: RunSpec, own: RunPaths, runs: Path, pods: Sequence[Pod], now_s: float
) -> list[str]:
    """Return what the ends of the pods mean for a job, by an earlier run of the same job."""
    ends_s = end_of(pods)
    leave_s = min((pod.leave_s for pod in pods if pod.leave_s is not None), default=None)
    if ends_s is None and leave_s is None:
        return []
    took_s, saved_in_s, name = _earlier_run(spec, own, runs)
    words = []
    if ends_s is not None:
        ends = f"the pods end at {moment(ends_s, _MOMENT)}, in {duration(ends_s - now_s)}"
        if took_s is None:
            words.append(f"{ends}; the pace of the run is unknown until its first steps")
        elif now_s + took_s >= ends_s:
            takes = f"the same job takes {duration(took_s)} at the pace of {name}"
            words.append(f"{ends}, and {takes}. {_ADVICE}")
    if leave_s is not None and saved_in_s is not None and saved_in_s > leave_s:
        words.append(
            f"a checkpoint of this job took {duration(saved_in_s)} in {name}, and pods have"
            f" {duration(leave_s)} for a checkpoint when the platform ends them. Start a cluster"
            " with a longer notice_s"
        )
    size = spec.job.views.checkpoint_bytes if spec.job.rules.checkpoints.brings else 0
    if leave_s is not None and 8 * size > leave_s * _LINK_BITS_PER_S:
        needed = 8 * size / leave_s / 1e9
        words.append(
            f"a checkpoint of this job has {scaled(size, 'B')}, and pods have {duration(leave_s)}"
            f" until the platform ends them: a copy in this time needs {needed:.0f} Gbit/s. Over a"
            " slower link, the run continues from the checkpoint before; a longer notice_s gives"
            " more time"
        )
    return words


def _earlier_run(
    spec: RunSpec, own: RunPaths, runs: Path
) -> tuple[float | None, float | None, str]:
    """Return the time of all steps of the last run of a job, of its last checkpoint, and its name.

    None: there was no such run, or it has no pace or no checkpoint.
    """
    newest_first = sorted(find_runs(runs), key=lambda each: each.root.name, reverse=True)
    for paths in newest_first[:_LOOKED_AT]:
        if paths.root == own.root or not has_result(paths):
            continue
        try:
            if _work_of(RunSpec.load(paths.spec, of_run=True)) != _work_of(spec):
                continue
            result = ResultRecord.load(paths.root)
            totals = TotalsTail(paths.events).read()
            took_s = _whole_time_s(result, totals)
            if took_s is not None:
                return took_s, totals.saved_in_s, paths.root.name
        # A run of another version or with damaged files is no measure.
        except (WorkbenchError, ValueError) as error:
            logger.info("%s has no pace: %s", paths.root, error)
    return None, None, ""


def _whole_time_s(result: ResultRecord, totals: RunTotals) -> float | None:
    """Return the time of all steps of a run, at its pace if it was not finished. None: no pace."""
    if result.state is RunState.SUCCEEDED or result.duration_s is None:
        return result.duration_s
    progress = totals.progress(result.state, "")
    if not progress.step or not progress.max_steps:
        return None
    first = result.resumed_step or 0
    done = progress.step - first
    return result.duration_s * (progress.max_steps - first) / done if done > 0 else None


def _work_of(spec: RunSpec) -> tuple[int, Mapping[str, object]]:
    """Return ranks and options of a job. A run's directory has no secrets, so `env` is left out."""
    return spec.world_size, {**spec.job.to_dict(), "env": None}
