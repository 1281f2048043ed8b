"""Check a DeepSpeed configuration against DeepSpeed 0.19.8 and the job. Changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import get_args

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import get_object
from workbench.base.redact import mask_secrets
from workbench.finetune.deepspeed.keys import REMOVED, REMOVED_OPTIMIZERS, REMOVED_ZERO, TOP_LEVEL
from workbench.finetune.deepspeed.kinds import check_kinds
from workbench.finetune.deepspeed.unsupported_keys import check_done
from workbench.finetune.options.choices import (
    Communication,
    Optimizer,
)
from workbench.finetune.options.model.models import model_family
from workbench.finetune.options.optimizers import LionOptions, MuonOptions
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.zero.nvme.config import OPTIMIZER, WEIGHTS, uses_disk
from workbench.finetune.techniques.zero.zero import is_offloaded

SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}
"""Nearest schedule of transformers for each schedule of DeepSpeed."""
# DeepSpeed's OneCycle has no learning rate before its first step, which is logged.
_RANGE_TEST = "LRRangeTest"
FIELDS: Mapping[str, str] = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "flops_profiler.profile_step": "profile_step",
}
"""Job options by key of the configuration. The profiler's key counts only if enabled."""
_KINDS_OF_OPTIMIZER: Mapping[Optimizer, Sequence[str]] = {
    "adamw": ("adamw", "adam"),
    "sgd": ("sgd",),
    "lion": ("lion",),
    "muon": ("muon",),
}
# Keys of `optimizer.params` with an effect on the package's own optimizers.
_PARAMS: Mapping[Optimizer, Sequence[str]] = {
    "lion": ("lr", "betas", "weight_decay"),
    "muon": ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay"),
}
# Keys of `zero_optimization` that move the matrices of a rank's part.
_MOVES_MATRICES = ("round_robin_gradients", "parameter_alignment")
_QUANTIZED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
_PLUS_PLUS = ("zero_hpz_partition_size", *_QUANTIZED)
_SECRET_KEY = re.compile(
    r'"([^"]*(?:api_?key|token|passw|secret|credential)[^"]*)": "[^"]+"', re.IGNORECASE
)


def check(
    config: Mapping[str, object],
    job: FineTuneOptions,
    *,
    source: str,
    gpus: int,
    world_size: int | None = None,
) -> None:
    """Raise ConfigError for a configuration refused by DeepSpeed or contradicting the job."""
    check_form(config, source)
    check_done(config, source)
    _check_secrets(config, source)
    zero = get_object(config, "zero_optimization")
    technique_of(job.technique).refuse_config(config, source)
    _check_stage_3(zero, world_size, source)
    _check_companions(config, source)
    if not gpus:
        _check_no_gpus(config, source)
    _check_precision(config, job, source)
    _check_optimizer(config, job, source)
    _check_muon(config, job, source)
    _check_scheduler(config, job, source)
    _check_equal(config, job, source, world_size)
    _check_async_save(zero, job, source)


def check_form(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for unknown or removed keys, and for values of the wrong kind."""
    zero = get_object(config, "zero_optimization")
    for where, keys, removed in (("", config, REMOVED), ("zero_optimization.", zero, REMOVED_ZERO)):
        for key in keys:
            if key in removed:
                raise ConfigError(
                    f"{source}: key '{where}{key}' was removed from DeepSpeed: {removed[key]}"
                )
    check_kinds(config, TOP_LEVEL, source)


def value_at(config: Mapping[str, object], key: str) -> object:
    """Return the value at `section.key` of a configuration; None if missing."""
    *sections, name = key.split(".")
    for section in sections:
        config = get_object(config, section)
    return config.get(name)


def _check_async_save(zero: Mapping[str, object], job: FineTuneOptions, source: str) -> None:
    for key in (OPTIMIZER, WEIGHTS):
        if job.async_save and uses_disk(zero, key):
            raise ConfigError(
                f"async_save copies a checkpoint to host memory, and {source} keeps {key} on a "
                "disk because memory is short; drop async_save"
            )


def _check_secrets(config: Mapping[str, object], source: str) -> None:
    text = json.dumps(config, default=str)
    named = _SECRET_KEY.search(text)
    if named or mask_secrets(text) != text:
        what = f"key '{named[1]}'" if named else "it"
        raise ConfigError(
            f"{source}: {what} holds a secret, which would be written to the run directory; "
            "leave it out and give it as a variable, as in env={'COMET_API_KEY': …}"
        )


def _check_stage_3(zero: Mapping[str, object], world_size: int | None, source: str) -> None:
    """Raise ConfigError for ZeRO++ without stage 3, and for groups of the wrong size."""
    third = zero.get("stage") == 3
    spread = zero.get("zero_hpz_partition_size", 1)
    for key in _PLUS_PLUS:
        value = zero.get(key)
        if not third and (value is True or (isinstance(value, int) and value > 1)):
            raise ConfigError(
                f"{source}: zero_optimization.{key} is ZeRO++, which is of stage 3; remove it"
            )
    if isinstance(spread, int) and world_size and spread > 1 and world_size % spread:
        raise ConfigError(
            f"{source}: zero_optimization.zero_hpz_partition_size is {spread}, and {world_size} "
            "ranks cannot be put into groups of as many; use the number of GPUs of a pod"
        )


def _check_companions(config: Mapping[str, object], source: str) -> None:
    """Raise ConfigError for a section without effect because another key is missing."""
    logger = get_object(config, "comms_logger")
    if logger.get("enabled") is True and logger.get("verbose") is not True:
        raise ConfigError(
            f"{source}: comms_logger.enabled is true, and the trainer does not call "
            "deepspeed.comm.log_summary; add 'verbose': true, which logs every operation"
        )


def _check_no_gpus(config: Mapping[str, object], source: str) -> None:
    offload = "zero_optimization.offload_optimizer.super_offload"
    for key in (*(f"zero_optimization.{key}" for key in _QUANTIZED), offload, "aio.use_gds"):
        if value_at(config, key) is True:
            raise ConfigError(
                f"{source}: {key} needs GPUs, DeepSpeed has nothing of it for CPUs; remove it"
            )


def _check_precision(config: Mapping[str, object], job: FineTuneOptions, source: str) -> None:
    half = value_at(config, "fp16.enabled")
    if half is True and model_family(job.model) == "encoder-decoder":
        raise ConfigError(f"{source}: fp16.enabled is true; T5 overflows in it, use bf16")
    if half in (True, False) and half != (job.precision == "fp16"):
        raise ConfigError(
            f"{source}: fp16.enabled is {str(half).lower()}, "
            f"and the job's precision is '{job.precision}'"
        )
    for key in ("bf16", "bfloat16", "torch_autocast"):
        enabled = value_at(config, f"{key}.enabled")
        if enabled is True and job.precision != "bf16":
            raise ConfigError(
                f"{source}: {key}.enabled is true, and the job's precision is '{job.precision}'"
            )
        if enabled is False and key != "torch_autocast" and job.precision == "bf16":
            raise ConfigError(
                f"{source}: {key}.enabled is false, and the job's precision is 'bf16'"
            )
    sent = config.get("communication_data_type")
    if sent in get_args(Communication) and job.communication not in (None, sent):
        raise ConfigError(
            f"{source}: communication_data_type is '{sent}', and "
            f"the job's communication is '{job.communication}'"
        )


def _check_optimizer(config: Mapping[str, object], job: FineTuneOptions, source: str) -> None:
    if "optimizer" not in config:
        return
    block = get_object(config, "optimizer")
    kind = str(block.get("type", "")).lower()
    if kind in REMOVED_OPTIMIZERS:
        raise ConfigError(
            f"{source}: optimizer.type {block['type']!r} was removed from DeepSpeed: use 'AdamW'"
        )
    known = [name for names in _KINDS_OF_OPTIMIZER.values() for name in names]
    if kind not in known:
        raise ConfigError(
            f"{source}: optimizer.type is {block.get('type')!r}, which FineTune "
            "does not have; write 'AdamW', 'SGD', 'Lion' or 'Muon', remove the block and choose "
            f"one of {', '.join(get_args(Optimizer))} as the job's optimizer, or use a Script"
        )
    if kind not in _KINDS_OF_OPTIMIZER.get(job.optimizer, ()):
        raise ConfigError(
            f"{source}: optimizer.type is {block.get('type')!r}, and the "
            f"job's optimizer is '{job.optimizer}'; change one of them"
        )
    if kind == "adam" and value_at(block, "params.adam_w_mode") is False:
        raise ConfigError(
            f"{source}: optimizer.params.adam_w_mode is false, and the job's optimizer is 'adamw'"
        )
    for key in get_object(block, "params"):
        if key not in _PARAMS.get(job.optimizer, (key,)):
            raise ConfigError(
                f"{source}: optimizer.params.{key} has no effect on optimizer '{job.optimizer}', "
                "which torch computes and not DeepSpeed; remove it"
            )


def _check_muon(config: Mapping[str, object], job: FineTuneOptions, source: str) -> None:
    """Raise ConfigError for keys that keep Muon from whole matrices, or AdamW from its rate."""
    if job.optimizer != "muon":
        return
    rate = MuonOptions.from_dict(job.optimizer_options).adam_learning_rate
    if "scheduler" in config and rate is not None:
        raise ConfigError(
            f"{source}: scheduler sets one learning rate for all weights, and adam_learning_rate "
            f"is {rate!r}; remove scheduler and use lr_scheduler_type, or drop adam_learning_rate"
        )
    zero = get_object(config, "zero_optimization")
    for key in _MOVES_MATRICES:
        if zero.get(key) is True:
            raise ConfigError(
                f"{source}: zero_optimization.{key} changes the place of matrices, and optimizer "
                "'muon' needs the matrices in order; remove it"
            )
    if is_offloaded(zero, "offload_optimizer"):
        raise ConfigError(
            f"{source}: zero_optimization.offload_optimizer is set, and optimizer 'muon' updates "
            "matrices on the device of the model; remove it, or use optimizer 'adamw' or 'lion'"
        )


def own_options(config: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return a JSON's values of the package's own optimizers: for `lion` and for `muon`.

    Example:
        >>> own_options({"optimizer": {"type": "Muon", "params": {"lr": 0.02}}})["muon"]
        {'adjust_lr_fn': 'original'}
    """
    lion: dict[str, object] = {}
    betas = value_at(config, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        lion = {"beta1": betas[0], "beta2": betas[1]}
    muon: dict[str, object] = {}
    rates = ("optimizer.params.lr", "optimizer.params.muon_lr")
    if any(value_at(config, key) is not None for key in rates):
        # A rate for DeepSpeed's Muon needs DeepSpeed's scale.
        muon["adjust_lr_fn"] = "original"
    momentum = value_at(config, "optimizer.params.momentum")
    if momentum not in (None, "auto"):
        muon["momentum"] = momentum
    rate = value_at(config, "optimizer.params.adam_lr")
    if rate is None and value_at(config, "optimizer.params.muon_lr") is not None:
        rate = value_at(config, "optimizer.params.lr")
    if rate not in (None, "auto"):
        muon["adam_learning_rate"] = rate
    return {"lion": lion, "muon": muon}


def _check_scheduler(config: Mapping[str, object], job: FineTuneOptions, source: str) -> None:
    named = value_at(config, "scheduler.type")
    if named is not None and named not in (*SCHEDULES, _RANGE_TEST):
        raise ConfigError(
            f"{source}: scheduler.type is {shortened(named)}, which FineTune does not run. Use "
            f"{', '.join(SCHEDULES)} or {_RANGE_TEST}, or remove scheduler and choose a "
            "lr_scheduler_type"
        )
    kind = SCHEDULES.get(str(named))
    if kind is not None and kind != job.lr_scheduler_type:
        raise ConfigError(
            f"{source}: scheduler.type decides how the learning rate continues ('{kind}'), "
            f"and the job's lr_scheduler_type is '{job.lr_scheduler_type}'; drop one"
        )


def _muon_values(
    config: Mapping[str, object], job: FineTuneOptions
) -> dict[str, tuple[str, object]]:
    """Return the names and values of a job's options, by the keys of DeepSpeed's Muon."""
    options = MuonOptions.from_dict(job.optimizer_options)
    of_adam = options.adam_learning_rate or job.learning_rate
    values: dict[str, tuple[str, object]] = {
        "optimizer.params.muon_lr": ("learning_rate", job.learning_rate),
        "optimizer.params.adam_lr": ("adam_learning_rate", of_adam),
        "optimizer.params.momentum": ("momentum", options.momentum),
    }
    # DeepSpeed uses `lr` where a rate of its own is missing.
    if value_at(config, "optimizer.params.muon_lr") is not None:
        values["optimizer.params.lr"] = ("adam_learning_rate", of_adam)
        if value_at(config, "optimizer.params.adam_lr") is not None:
            values["optimizer.params.lr"] = ("", value_at(config, "optimizer.params.lr"))
    return values


def _check_equal(
    config: Mapping[str, object],
    job: FineTuneOptions,
    source: str,
    world_size: int | None,
) -> None:
    """Raise ConfigError for keys that contradict the job's options."""
    wanted = {key: (name, getattr(job, name)) for key, name in FIELDS.items()}
    betas = [job.adam_beta1, job.adam_beta2]
    if job.optimizer == "lion":
        lion = LionOptions.from_dict(job.optimizer_options)
        wanted["optimizer.params.betas"] = ("optimizer_options", [lion.beta1, lion.beta2])
    else:
        wanted["optimizer.params.betas"] = ("adam_beta1 and adam_beta2", betas)
    if job.optimizer == "muon":
        wanted |= _muon_values(config, job)
    if world_size is not None:
        name = f"per_device_train_batch_size x gradient_accumulation_steps x {world_size} ranks"
        # DeepSpeed counts the ranks, also if several share a row.
        rows = job.per_device_train_batch_size * job.gradient_accumulation_steps * world_size
        wanted["train_batch_size"] = (name, rows)
    if value_at(config, "flops_profiler.enabled") is not True:
        del wanted["flops_profiler.profile_step"]
    for key, (name, want) in wanted.items():
        got = value_at(config, key)
        if got not in (None, "auto", want):
            raise ConfigError(
                f"{source}: {key} is {got!r}, and the job's "
                f"{name} is {want!r}; write 'auto', or change one"
            )
