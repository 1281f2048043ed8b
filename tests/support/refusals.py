"""Check a job as `submit` does, for pods with a number of GPUs."""

from __future__ import annotations

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.job.refusals import check, known


def check_on(job: FineTune, *, gpus: int) -> None:
    """Raise ConfigError for a job that pods with `gpus` GPUs, or the model's folder, refuse."""
    check(job, known(job, gpus=gpus))
