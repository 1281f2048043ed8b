"""Refusals of options about GPUs: options that need GPUs, and GPUs that a pod lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError, shortened
from workbench.base.json_values import Json, as_str
from workbench.finetune.options.choices import BITSANDBYTES
from workbench.finetune.options.refusals.shared import check_others

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_device_map(job: FineTuneOptions) -> None:
    """Raise ConfigError for limits without `device_map`, and for a compiled spread model."""
    if job.max_memory and not job.device_map:
        raise ConfigError(
            "max_memory limits the weights that device_map puts on a GPU: give device_map='auto' "
            "too"
        )
    if job.device_map and job.torch_compile:
        raise ConfigError(
            "torch_compile with device_map is not offered: drop torch_compile or device_map"
        )


def check_max_memory(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for a GPU that a pod lacks."""
    missing = [gpu for gpu in job.max_memory if int(gpu) >= gpus]
    if gpus and missing:
        raise ConfigError(
            f"max_memory names GPU {missing[0]}, and a pod has {gpus}, numbered from 0; drop GPU "
            f"{missing[0]}"
        )


def check_liger(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for Liger's kernels on CPUs."""
    if not gpus and job.training.get("use_liger_kernel"):
        raise ConfigError(
            "training 'use_liger_kernel' needs GPUs: Liger's kernels are written in Triton. Drop "
            "it on CPUs, where the loss is computed in pieces anyway"
        )


def check_float8(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that exclude `float8`."""
    if not job.float8:
        return
    others = {
        "peft": job.peft != "none",
        "tensor_parallel": job.tensor_parallel > 1,
        "use_liger_kernel": bool(job.training.get("use_liger_kernel")),
        "precision 'fp16'": job.precision == "fp16",
        "precision 'tf32'": job.precision == "tf32",
        f"method {job.method!r}": job.method != "sft",
    }
    check_others("float8", others)


def check_float8_on_cpus(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for `float8` beside half formats on CPUs."""
    if job.float8 and not gpus and job.precision == "bf16":
        raise ConfigError(
            "float8 is emulated in fp32 on CPUs, and precision is 'bf16'; drop precision"
        )


def check_attention(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for an attention of the job that CPUs lack."""
    name = job.attn_implementation
    if not gpus and name not in (None, "eager", "sdpa"):
        raise ConfigError(f"attn_implementation '{name}' needs GPUs; use 'sdpa' on CPUs")


def check_own_attention(job: FineTuneOptions, gpus: int, config: Json) -> None:
    """Raise ConfigError for an attention of the model's configuration that CPUs lack."""
    own = as_str(config.get("attn_implementation"))
    if not gpus and own.startswith("flash_attention") and job.attn_implementation is None:
        raise ConfigError(
            f"config.json of {job.model!r} has attn_implementation {shortened(own)}, which needs "
            "GPUs. Give attn_implementation='sdpa' on CPUs"
        )


def check_precision(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for TF32 on CPUs."""
    if not gpus and job.precision == "tf32":
        raise ConfigError(
            "precision 'tf32' needs NVIDIA GPUs of the "
            "Ampere generation or later; use 'fp32' on CPUs"
        )


def check_bitsandbytes(job: FineTuneOptions, gpus: int) -> None:
    """Raise ConfigError for an optimizer of bitsandbytes on CPUs."""
    if not gpus and job.optimizer in BITSANDBYTES:
        raise ConfigError(f"optimizer '{job.optimizer}' needs GPUs; use 'adamw' on CPUs")
