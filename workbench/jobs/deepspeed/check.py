"""Whether a DeepSpeed configuration fits DeepSpeed 0.19.8 and the job it is given to. Changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from workbench.base.errors import ConfigError, shortened
from workbench.base.redact import mask_secrets
from workbench.jobs.choices import Communication, Optimizer, Precision, Schedule, Technique
from workbench.jobs.deepspeed.keys import REMOVED, REMOVED_OPTIMIZERS, REMOVED_ZERO, TOP_LEVEL
from workbench.jobs.deepspeed.kinds import check_kinds
from workbench.jobs.finetune import FineTune
from workbench.jobs.model import Family, model_family

SCHEDULES = {
    "WarmupLR": Schedule.CONSTANT_WITH_WARMUP,
    "WarmupDecayLR": Schedule.LINEAR,
    "WarmupCosineLR": Schedule.COSINE,
}
"""DeepSpeed's schedules by the names of the nearest of transformers'."""
_MISSING = object()
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_PLUS_PLUS = ("zero_hpz_partition_size", *_QUANTIZED)
_SECRET_KEY = re.compile(r'"([^"]*(?:api_?key|token|passw|secret|credential)[^"]*)": "[^"]+"', re.IGNORECASE)


def check(
    config: Mapping[str, object], job: FineTune, *, source: str, gpus: int, world_size: int | None = None
) -> None:
    """Refuse a configuration that DeepSpeed would refuse, or that says something else than the job."""
    check_form(config, source)
    _check_secrets(config, source)
    zero = section(config, "zero_optimization", source)
    _check_zero(zero, Technique(job.technique), source)
    _check_stage_3(zero, world_size, source)
    if not gpus:
        _check_no_gpus(zero, section(config, "aio", source), source)
    _check_precision(config, job, source)
    _check_optimizer(config, job, source)
    _check_scheduler(config, job, source)
    _check_numbers(config, job, source, world_size)


def check_form(config: Mapping[str, object], source: str) -> None:
    """Refuse keys that DeepSpeed does not know, or no longer, and values that it cannot read."""
    _check_removed(config, source)
    check_kinds(config, TOP_LEVEL, source)


def section(config: Mapping[str, object], key: str, source: str) -> Mapping[str, object]:
    """Return an object of the configuration, an empty one where the key is missing."""
    match config.get(key, {}):
        case Mapping() as value:
            return value
        case value:
            raise ConfigError(f"{source}: {key} is {shortened(value)}; it must be an object")


def _check_removed(config: Mapping[str, object], source: str) -> None:
    zero = section(config, "zero_optimization", source)
    for where, keys, removed in (("", config, REMOVED), ("zero_optimization.", zero, REMOVED_ZERO)):
        for key in keys:
            if key in removed:
                raise ConfigError(f"{source}: key '{where}{key}' was removed from DeepSpeed: {removed[key]}")


def _check_secrets(config: Mapping[str, object], source: str) -> None:
    text = json.dumps(config, default=str)
    named = _SECRET_KEY.search(text)
    if named or mask_secrets(text) != text:
        what = f"key '{named[1]}'" if named else "it"
        raise ConfigError(
            f"{source}: {what} holds a secret, which would be written to the run directory; leave it out and give it "
            "as a variable, as in env={'COMET_API_KEY': …}"
        )


def _check_zero(zero: Mapping[str, object], technique: Technique, source: str) -> None:
    stage = zero.get("stage", 0)
    if stage != technique.zero_stage:
        raise ConfigError(
            f"{source}: zero_optimization.stage is {stage!r}, and technique '{technique}' is stage "
            f"{technique.zero_stage}; change one of them"
        )
    for old in ("cpu_offload", "cpu_offload_param"):
        if zero.get(old):
            raise ConfigError(f"{source}: zero_optimization.{old} is deprecated; use offload_optimizer, offload_param")
    offloads = [key for key in ("offload_optimizer", "offload_param") if _is_offload(zero.get(key))]
    if technique is Technique.ZERO3_OFFLOAD and "offload_optimizer" not in offloads:
        raise ConfigError(
            f"{source}: technique '{technique}' needs zero_optimization.offload_optimizer with a device; "
            "add it, or choose technique 'zero3'"
        )
    allowed = {Technique.ZERO3_OFFLOAD: 2, Technique.ZERO3: 0}.get(technique, 1)  # of what stands there, in order
    if wrong := [key for key in offloads if key not in ("offload_optimizer", "offload_param")[:allowed]]:
        what = "optimizer states alone" if allowed else "nothing"
        raise ConfigError(
            f"{source}: zero_optimization.{wrong[0]} is set, and technique '{technique}' offloads {what}; "
            "choose technique 'zero3-offload', or remove it"
        )
    if technique.zero_stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is False:
        raise ConfigError(
            f"{source}: zero_optimization.stage3_gather_16bit_weights_on_model_save is false; it must be true "
            "for the trained model to be saved whole"
        )


def _check_stage_3(zero: Mapping[str, object], world_size: int | None, source: str) -> None:
    """Refuse what stage 3 alone knows (NVMe, ZeRO++) under another, and what it would stumble on later."""
    third = zero.get("stage") == 3
    for key in ("offload_optimizer", "offload_param"):
        part = section({key: zero.get(key) or {}}, key, source)
        if part.get("device") == "nvme" and not (third and str(part.get("nvme_path")).startswith("/")):
            what = (
                "give a folder of each pod as nvme_path, from / on"
                if third
                else "stage 3 alone has it; use device 'cpu'"
            )
            raise ConfigError(f"{source}: zero_optimization.{key}.device is 'nvme'; {what}")
    spread = zero.get("zero_hpz_partition_size", 1)
    for key in _PLUS_PLUS:
        value = zero.get(key)
        if not third and (value is True or (isinstance(value, int) and value > 1)):
            raise ConfigError(f"{source}: zero_optimization.{key} is ZeRO++, which is of stage 3; remove it")
    if isinstance(spread, int) and world_size and spread > 1 and world_size % spread:
        raise ConfigError(
            f"{source}: zero_optimization.zero_hpz_partition_size is {spread}, and {world_size} ranks cannot be put "
            "into groups of as many; use the number of GPUs of a pod"
        )


def _check_no_gpus(zero: Mapping[str, object], aio: Mapping[str, object], source: str) -> None:
    switches = {f"zero_optimization.{key}": zero.get(key) for key in _QUANTIZED} | {"aio.use_gds": aio.get("use_gds")}
    for key, value in switches.items():
        if value is True:
            raise ConfigError(f"{source}: {key} needs GPUs, DeepSpeed has nothing of it for CPUs; remove it")


def _is_offload(value: object) -> bool:
    return section({"offload": value or {}}, "offload", "").get("device", "none") not in ("none", None)


def _check_precision(config: Mapping[str, object], job: FineTune, source: str) -> None:
    half = section(config, "fp16", source).get("enabled")
    if half is True and model_family(job.model) is Family.ENCODER_DECODER:
        raise ConfigError(f"{source}: fp16.enabled is true; T5 overflows in it, use bf16")
    if half in (True, False) and half != (job.precision == Precision.FP16):
        raise ConfigError(
            f"{source}: fp16.enabled is {str(half).lower()}, and the job's precision is '{job.precision}'"
        )
    for key in ("bf16", "bfloat16", "torch_autocast"):
        enabled = section(config, key, source).get("enabled")
        if enabled is True and job.precision != Precision.BF16:
            raise ConfigError(f"{source}: {key}.enabled is true, and the job's precision is '{job.precision}'")
        if enabled is False and key != "torch_autocast" and job.precision == Precision.BF16:
            raise ConfigError(f"{source}: {key}.enabled is false, and the job's precision is 'bf16'")
    sent = config.get("communication_data_type")
    if sent in [*Communication] and job.communication not in (None, sent):
        raise ConfigError(
            f"{source}: communication_data_type is '{sent}', and the job's communication is '{job.communication}'"
        )


def _check_optimizer(config: Mapping[str, object], job: FineTune, source: str) -> None:
    if "optimizer" not in config:
        return
    block = section(config, "optimizer", source)
    kind = str(block.get("type", "")).lower()
    if kind in REMOVED_OPTIMIZERS:
        raise ConfigError(f"{source}: optimizer.type {block['type']!r} was removed from DeepSpeed: use 'AdamW'")
    fitting = {Optimizer.ADAMW: ("adamw", "adam"), Optimizer.SGD: ("sgd",)}.get(Optimizer(job.optimizer), ())
    if kind not in fitting:
        raise ConfigError(
            f"{source}: optimizer.type is {block.get('type')!r}, and the job's optimizer is '{job.optimizer}'; "
            "change one of them"
        )
    params = section(block, "params", source)
    if kind == "adam" and params.get("adam_w_mode") is False:
        raise ConfigError(f"{source}: optimizer.params.adam_w_mode is false, and the job's optimizer is 'adamw'")
    fields = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    _check_equal(params, job, source, fields, "optimizer.params.")
    betas = [job.adam_beta1, job.adam_beta2]
    _equal(source, "optimizer.params.betas", params.get("betas", _MISSING), "adam_beta1 and adam_beta2", betas)


def _check_scheduler(config: Mapping[str, object], job: FineTune, source: str) -> None:
    params = section(section(config, "scheduler", source), "params", source)
    kind = SCHEDULES.get(str(section(config, "scheduler", source).get("type")))
    if kind is not None and kind != job.lr_scheduler_type:
        raise ConfigError(
            f"{source}: scheduler.type decides how the learning rate goes on ('{kind}'), and the job's "
            f"lr_scheduler_type is '{job.lr_scheduler_type}'; drop one"
        )
    fields = {"warmup_max_lr": "learning_rate", "total_num_steps": "max_steps", "warmup_num_steps": "warmup_steps"}
    _check_equal(params, job, source, fields, "scheduler.params.")


def _check_numbers(config: Mapping[str, object], job: FineTune, source: str, world_size: int | None) -> None:
    fields = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
    }
    _check_equal(config, job, source, fields)
    if world_size is not None:
        name = f"per_device_train_batch_size x gradient_accumulation_steps x {world_size} ranks"
        _equal(source, "train_batch_size", config.get("train_batch_size", _MISSING), name, job.global_batch(world_size))
    profiler = section(config, "flops_profiler", source)
    if profiler.get("enabled") is True:
        _check_equal(profiler, job, source, {"profile_step": "profile_step"}, "flops_profiler.")


def _check_equal(
    values: Mapping[str, object], job: FineTune, source: str, fields: Mapping[str, str], at: str = ""
) -> None:
    """Refuse keys of a section that say something else than the job's option of the name beside them."""
    for key, field in fields.items():
        _equal(source, f"{at}{key}", values.get(key, _MISSING), field, getattr(job, field))


def _equal(source: str, key: str, got: object, field: str, want: object) -> None:
    if got is not _MISSING and got not in ("auto", want):
        raise ConfigError(f"{source}: {key} is {got!r}, and the job's {field} is {want!r}; write 'auto', or change one")
