"""Set open options of a job from its adapters, its DeepSpeed JSON, or its model and pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from workbench.base.errors import ConfigError, shortened
from workbench.base.files import is_there, read_given, user_path
from workbench.base.json_values import Json, as_str, get_object, parse_json
from workbench.finetune.deepspeed.check import FIELDS, SCHEDULES, check_form, own_options, value_at
from workbench.finetune.deepspeed.files import load
from workbench.finetune.methods.registry import method_of
from workbench.finetune.options.adapters import Lora
from workbench.finetune.options.choices import Communication, Precision
from workbench.finetune.options.model.folders import ADAPTERS
from workbench.finetune.options.model.models import (
    TINY_LLAMA,
    TINY_T5,
    Family,
    family_by_name,
    model_family,
    model_kind,
)
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import TECHNIQUES

_Options = TypeVar("_Options", bound=FineTuneOptions)
_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
}
# https://arxiv.org/abs/2302.06675, section 5: a rate 3 to 10 times smaller than AdamW's.
_LION_SHARE = 5
_KIND = "LORA"
# peft's name of each option of `Lora`.
_LORA = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save",
    "use_dora": "use_dora",
    "bias": "bias",
}


def choose(
    job: _Options,
    *,
    gpus: int,
    world_size: int | None = None,
    looks: bool = True,
    apart: bool = False,
) -> _Options:
    """Return the job with a value for every open option. Options that are set stay unchanged.

    `looks` opens the files that the job names; use False for a job of another user. `apart` means
    pods on separate hosts, connected by a network.

    Example:
        >>> choose(FineTuneOptions(model="google/flan-t5-small"), gpus=1).learning_rate
        0.0003
    """
    if looks:
        job = on_base(job)
    if job.deepspeed is not None and (looks or not isinstance(job.deepspeed, str)):
        job = _as_json_says(job, world_size)
    if job.learning_rate is None:
        family = (model_family if looks else family_by_name)(job.model)
        share = _LION_SHARE if job.optimizer == "lion" else 1
        job = job.replace(learning_rate=_learning_rate(job, family) / share)
    if job.precision is None:
        precision = "fp32"
        if gpus and job.model not in (TINY_T5, TINY_LLAMA):
            precision = "bf16"
        job = job.replace(precision=precision)
    if job.communication is None and apart and not gpus:
        job = job.replace(communication="bf16")
    return job


def on_base(job: _Options) -> _Options:
    """Return a job on a folder of adapters as a job on their base model.

    The job gets the options of the adapters. Other jobs are returned unchanged.

    Raises:
        ConfigError: `peft` is 'none', or an option of `lora` differs from the adapters.
    """
    named = job.lora.get("resume_from")
    folder = user_path(str(named or job.model)).absolute()
    if not named and not is_there(folder / ADAPTERS):
        return job
    if job.peft == "none":
        raise ConfigError(
            f"model {job.model!r} holds adapters: give peft='lora' or 'qlora' to "
            "continue to train them, or merge them into their base first (run.merge)"
        )
    config = _adapters(folder)
    kind = as_str(config.get("peft_type")) or _KIND
    if kind != _KIND:
        raise ConfigError(
            f"{folder / ADAPTERS} has peft_type {shortened(kind)}, and FineTune continues adapters "
            f"of peft_type {_KIND!r} alone. Use a Script with peft"
        )
    # The options of the adapters on the disk replace the job's; a different wish is refused.
    made = {
        name: config[theirs] for name, theirs in _LORA.items() if config.get(theirs) is not None
    }
    for key in ("target_modules", "target_parameters"):
        names = made.get(key)
        if isinstance(names, list):
            made[key] = sorted(str(name) for name in names)
    now = Lora.from_dict(job.lora).to_dict()
    try:
        then = Lora.from_dict(made).to_dict()
    except ConfigError as error:
        raise ConfigError(
            f"{folder / ADAPTERS}: {error}. To continue these adapters, use a Script with peft"
        ) from error
    for name in job.lora:
        if name != "resume_from" and now[name] != then[name]:
            raise ConfigError(
                f"lora {name} is {now[name]!r}, and the adapters "
                f"in {folder} have {then[name]!r}; drop it"
            )
    base = job.model if named else _base_of(folder, config)
    return job.replace(
        model=base,
        model_revision=_revision_of(job, base, config),
        seed=_seed_of(job, base, config),
        lora={**made, "resume_from": str(folder)},
    )


def _adapters(folder: Path) -> Json:
    try:
        return get_object({"config": parse_json(read_given(folder / ADAPTERS))}, "config")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the adapters in {folder} cannot be gone on with: {ADAPTERS} is unreadable"
        ) from error


def _base_of(folder: Path, config: Json) -> str:
    base = as_str(config.get("base_model_name_or_path"))
    try:
        model_kind(base)
    except ConfigError as error:
        raise ConfigError(
            f"{folder / ADAPTERS} names {base!r} as the base of the adapters, and this machine has "
            "no such model. Give the base and the adapters: model=BASE and "
            f"lora={{'resume_from': {str(folder)!r}}}"
        ) from error
    return base


def _seed_of(job: FineTuneOptions, base: str, config: Json) -> int:
    seed = as_str(config.get("revision")).removeprefix("seed-")
    if base not in (TINY_T5, TINY_LLAMA) or not seed.isdigit() or int(seed) == job.seed:
        return job.seed
    if "seed" in job.model_fields_set:
        raise ConfigError(
            f"the adapters are of {base!r} with seed {seed}, "
            f"and the job's seed is {job.seed}; drop it"
        )
    return int(seed)


def _revision_of(job: FineTuneOptions, base: str, config: Json) -> str | None:
    made = as_str(config.get("revision"))
    of_base = base == as_str(config.get("base_model_name_or_path"))
    if not made or not of_base or base in (TINY_T5, TINY_LLAMA) or is_there(user_path(base)):
        return job.model_revision
    if job.model_revision not in (None, made):
        raise ConfigError(
            f"the adapters are of {base!r} at revision {made!r}, and model_revision is "
            f"{job.model_revision!r}; drop it"
        )
    return made


def _learning_rate(job: FineTuneOptions, family: Family | None) -> float:
    if job.model in (TINY_T5, TINY_LLAMA):
        return 1e-3  # random initial weights
    of_method = method_of(job.method).learning_rates
    if of_method is not None:
        # https://huggingface.co/docs/trl/dpo_trainer, section "Train adapters with PEFT".
        return of_method[job.peft != "none"]
    if family == "encoder-decoder":
        return 3e-4  # https://huggingface.co/docs/transformers/model_doc/t5: 1e-4 to 3e-4
    # QLoRA: https://arxiv.org/abs/2305.14314, table 9.
    # Llama 2: https://arxiv.org/abs/2307.09288, section 3.1.
    return 2e-5 if job.peft == "none" else 2e-4


def _as_json_says(job: _Options, world_size: int | None) -> _Options:
    config, source = load(job)
    check_form(config, source)
    values = dict(_values(config, job, world_size))
    if job.warmup_ratio is not None:
        values.pop("warmup_steps", None)
    left_open = {}
    for name, value in values.items():
        if name not in job.model_fields_set or getattr(job, name) is None:
            left_open[name] = value
    try:
        return job.replace(**left_open)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _values(
    config: Mapping[str, Any], job: FineTuneOptions, world_size: int | None
) -> Iterator[tuple[str, object]]:
    """Yield the options that a user's JSON sets, by the job's names."""
    betas = value_at(config, "optimizer.params.betas")
    beta1 = None
    beta2 = None
    if isinstance(betas, list) and len(betas) == 2:
        beta1, beta2 = betas
    optimizer = _OPTIMIZERS.get(str(value_at(config, "optimizer.type")).lower())
    own = own_options(config)
    if optimizer == "lion":
        # The betas of the JSON are Lion's.
        beta1, beta2 = None, None
    communication = config.get("communication_data_type")
    # Values of the job that the JSON decides under other names.
    values: dict[str, object] = {
        "technique": _technique(get_object(config, "zero_optimization")),
        "precision": _number_format(config),
        "communication": communication if communication in get_args(Communication) else None,
        "optimizer": optimizer,
        "optimizer_options": own.get(str(optimizer)) or None,
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "lr_scheduler_type": SCHEDULES.get(str(value_at(config, "scheduler.type"))),
    }
    for key, name in FIELDS.items():
        if name != "profile_step" or value_at(config, "flops_profiler.enabled") is True:
            values[name] = _first(values.get(name), value_at(config, key))
    if optimizer == "muon":
        own_rate = value_at(config, "optimizer.params.muon_lr")
        values["learning_rate"] = _first(own_rate, values["learning_rate"])
    if value_at(config, "flops_profiler.enabled") is False:
        values["profile_step"] = 0
    for name, value in values.items():
        if value not in (None, "auto"):
            yield name, value
    # The whole batch decides the rows per device if it divides evenly.
    whole = config.get("train_batch_size")
    rows = values["per_device_train_batch_size"]
    steps = _first(values["gradient_accumulation_steps"], job.gradient_accumulation_steps)
    if world_size and rows is None and isinstance(whole, int) and isinstance(steps, int):
        micro, left = divmod(whole, steps * world_size)
        if micro and not left:
            yield "per_device_train_batch_size", micro


def _first(*values: object) -> object:
    return next((value for value in values if value not in (None, "auto")), None)


def _technique(zero: Mapping[str, Any]) -> str | None:
    return next((technique.name for technique in TECHNIQUES if technique.is_of(zero)), None)


def _number_format(config: Mapping[str, object]) -> Precision | None:
    for name in ("bf16", "bfloat16", "torch_autocast"):
        if value_at(config, f"{name}.enabled") is True:
            return "bf16"
    if value_at(config, "fp16.enabled") is True:
        return "fp16"
    if False in (value_at(config, "bf16.enabled"), value_at(config, "bfloat16.enabled")):
        return "fp32"
    return None
