"""A job's DeepSpeed configuration: read, checked and filled in without importing DeepSpeed, before anything starts."""

from __future__ import annotations

import copy
import importlib.resources
import json
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, user_path
from workbench.base.json_values import parse_json
from workbench.jobs.choices import Optimizer, Precision, Technique
from workbench.jobs.deepspeed.check import check
from workbench.jobs.finetune import FineTune
from workbench.jobs.refusals import check_at_submit

__all__ = ["load", "resolve"]


def resolve(job: FineTune, *, gpus: int, world_size: int | None = None) -> dict[str, object] | None:
    """Make the configuration that the ranks of a job train with.

    Args:
        job: Its own `deepspeed`, or else its technique's file in `dsconfig/`, is the start.
        gpus: GPUs of a pod; 0 for CPUs.
        world_size: The number of ranks, where it is known: then `train_batch_size` is checked too.

    Returns:
        The whole configuration, or None for a technique without DeepSpeed.

    Raises:
        ConfigError: The file is missing or not JSON, or a key is unknown, was removed, or contradicts the job.

    Example:
        >>> resolve(FineTune(technique="zero1"), gpus=0)["zero_optimization"]["stage"]
        1
    """
    check_at_submit(job, gpus=gpus)
    technique = Technique(job.technique)
    if not technique.uses_deepspeed:
        return None
    config, source = load(job)
    if job.deepspeed is None and job.optimizer != Optimizer.ADAMW:
        config.pop("optimizer", None)
    check(config, job, source=source, world_size=world_size)
    return _fill(config, job, gpus=gpus)


def load(job: FineTune) -> tuple[dict[str, Any], str]:
    """Read a job's configuration as written; a missing `dsconfig/NAME.json` is the file of that name that is shipped.

    Returns:
        A copy of its own, and what to call it in messages.

    Raises:
        ConfigError: There is no such file, or it is not a JSON object.
    """
    name = f"{job.technique}.json"
    match job.deepspeed:
        case Mapping() as given:
            return copy.deepcopy(dict(given)), "deepspeed"
    if job.deepspeed is not None:
        path = user_path(job.deepspeed)
        if is_there(path) or path.parent.name != "dsconfig" or path.parent.parent != Path():
            return _parse(_read(path), str(path)), str(path)
        name = path.name
    return _parse(_shipped(name).read_text(encoding="utf-8"), f"dsconfig/{name}"), f"dsconfig/{name}"


def _shipped(name: str) -> Traversable:
    package = importlib.resources.files("workbench")
    inside = package / "dsconfig" / name
    if inside.is_file():
        return inside
    # A checkout keeps the folder beside the package, where a user finds it.
    beside = getattr(package, "parent", None)
    if beside is not None and (beside / "dsconfig" / name).is_file():
        file: Traversable = beside / "dsconfig" / name
        return file
    shipped = ", ".join(sorted(_names(package)))
    raise ConfigError(f"dsconfig/{name} is not among the files that are shipped: {shipped or 'none; install again'}")


def _names(package: Traversable) -> set[str]:
    folders = (package / "dsconfig", getattr(package, "parent", package) / "dsconfig")
    return {file.name for folder in folders if folder.is_dir() for file in folder.iterdir()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"deepspeed file {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"deepspeed file {str(path)!r} is not UTF-8 text") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ConfigError(f"{source}: key '{key}' stands there twice; remove one")
            seen[key] = value
        return seen

    try:
        config = parse_json(text, object_pairs_hook=once)
    except ConfigError:
        raise
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} line {error.lineno} column {error.colno}: {error.msg}; it must be JSON") from error
    except ValueError as error:
        raise ConfigError(f"{source} cannot be read: {error}; correct it") from error
    match config:
        case dict():
            return config
    raise ConfigError(f"{source} holds {type(config).__name__}; a DeepSpeed configuration is an object")


def _fill(config: dict[str, Any], job: FineTune, *, gpus: int) -> dict[str, object]:
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        config.setdefault(key, "auto")
    config.setdefault("gradient_clipping", "auto")
    # DeepSpeed prints a line every 10 steps by default; the trainer tells every step by itself.
    config.setdefault("steps_per_print", 1_000_000_000)
    if "bf16" not in config and "bfloat16" not in config:
        config["bf16"] = {"enabled": "auto"}
    if job.precision == Precision.FP16:
        config.setdefault("fp16", {"enabled": "auto"})
    zero = config["zero_optimization"]
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    # The trainer drives the profiler itself: DeepSpeed's switch slows every step of the run, not only the profiled.
    config["flops_profiler"] = {**config.get("flops_profiler", {}), "enabled": False}
    _fill_optimizer(config, job, gpus=gpus)
    if not gpus:
        for offload in ("offload_optimizer", "offload_param"):
            if zero.get(offload):
                zero[offload]["pin_memory"] = False  # pinning serves copies to a GPU
    return config


def _fill_optimizer(config: dict[str, Any], job: FineTune, *, gpus: int) -> None:
    offload = job.technique == Technique.ZERO3_OFFLOAD
    if job.optimizer != Optimizer.ADAMW:
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False
        return
    if offload and "optimizer" not in config:
        auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": auto}
    if not gpus and "optimizer" in config:
        # DeepSpeed's own Adam would be compiled first, which takes minutes; torch's does the same on a CPU.
        config["optimizer"].setdefault("params", {})["torch_adam"] = True
