"""Refusals of the optimizer and of the schedule of the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.finetune.options.optimizers import OPTIMIZER_OPTIONS

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions

# Options that some schedules of transformers require: at least one per schedule.
_SCHEDULE_NEEDS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}


def check_optimizer(job: FineTuneOptions) -> None:
    """Raise ConfigError for options of another optimizer, and for parts of matrices under Muon."""
    optimizer = job.optimizer
    fields = type(job).model_fields
    adams = []
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if getattr(job, name) != fields[name].default:
            adams.append(name)
    if optimizer in ("sgd", "lion") and adams:
        instead = " or use optimizer_options," if optimizer == "lion" else ""
        raise ConfigError(
            f"{adams[0]} is AdamW's, and the optimizer is '{optimizer}'; drop {adams[0]},"
            f"{instead} or choose 'adamw'"
        )
    options = OPTIMIZER_OPTIONS.get(optimizer)
    if options is not None:
        options.from_dict(job.optimizer_options)
    elif job.optimizer_options:
        raise ConfigError(
            f"optimizer_options are for {' and '.join(OPTIMIZER_OPTIONS)}, and the optimizer is "
            f"'{optimizer}'; drop optimizer_options, or choose one of these optimizers"
        )
    if optimizer == "muon" and job.peft != "none":
        raise ConfigError(
            f"optimizer 'muon' orthogonalizes the update of a whole matrix, and peft '{job.peft}' "
            "trains two factors of the update; use 'adamw' or 'lion', or peft 'none'"
        )
    if optimizer == "muon" and job.tensor_parallel > 1:
        raise ConfigError(
            "optimizer 'muon' needs whole matrices, and tensor_parallel cuts the matrices; use "
            "'adamw' or 'lion', or drop tensor_parallel"
        )


def check_schedule(job: FineTuneOptions) -> None:
    """Raise ConfigError for a warm-up that the schedule lacks, and for options that it needs."""
    if job.warmup_steps is not None and job.warmup_ratio is not None:
        raise ConfigError(
            f"warmup_steps is {job.warmup_steps} and warmup_ratio is {job.warmup_ratio}: both set "
            "the length of the warm-up; drop warmup_steps or warmup_ratio"
        )
    if job.lr_scheduler_type == "constant" and (job.warmup_steps or job.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_type 'constant' is at its peak from the first "
            "step, and a warm-up is asked for; use 'constant_with_warmup'"
        )
    options = job.training.get("lr_scheduler_kwargs") or {}
    needs = _SCHEDULE_NEEDS.get(job.lr_scheduler_type, ())
    if needs and not (isinstance(options, Mapping) and any(name in options for name in needs)):
        raise ConfigError(
            f"lr_scheduler_type {job.lr_scheduler_type!r} needs {' or '.join(needs)}: "
            f"training={{'lr_scheduler_kwargs': {{{needs[0]!r}: …}}}}"
        )
