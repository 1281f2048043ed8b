"""The end that a platform sets for the pods of a run, beside the run's own pace.

The pace is measured from the run's steps. Nothing is predicted from the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.words import duration, moment, scaled
from workbench.pods.pod import Pod
from workbench.rundir.spec import RunSpec
from workbench.rundir.totals import Progress

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


def said_at_submit(spec: RunSpec, pods: Sequence[Pod]) -> str:
    """Return that a checkpoint of a job may not be copied before the pods end, or nothing."""
    leave_s = min((pod.leave_s for pod in pods if pod.leave_s is not None), default=None)
    size = spec.job.views.checkpoint_bytes if spec.job.rules.checkpoints.brings else 0
    if leave_s is None or 8 * size <= leave_s * _LINK_BITS_PER_S:
        return ""
    needed = 8 * size / leave_s / 1e9
    return (
        f"a checkpoint of this job has {scaled(size, 'B')}, and pods have {duration(leave_s)}"
        f" until the platform ends them: a copy in this time needs {needed:.0f} Gbit/s. Over a"
        " slower link, the run continues from the checkpoint before; a longer notice_s gives"
        " more time"
    )
