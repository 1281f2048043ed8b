"""Refusals of `tensor_parallel`: models, options and pods that cannot share weights of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.json_values import Json, as_int
from workbench.finetune.options.model.models import language_of
from workbench.finetune.options.refusals.shared import (
    check_heads,
    check_others,
    has_experts,
)

if TYPE_CHECKING:
    from workbench.finetune.options.options import FineTuneOptions


def check_tensor(job: FineTuneOptions) -> None:
    """Raise ConfigError for options that exclude `tensor_parallel`."""
    if job.tensor_parallel == 1:
        return
    if job.precision == "fp16":
        raise ConfigError("tensor_parallel works without precision 'fp16'; use 'bf16'")
    if job.peft == "qlora":
        raise ConfigError("tensor_parallel cuts no weights in 4 bits; use peft='lora'")
    others = {
        "sequence_parallel": job.sequence_parallel > 1,
        "torch_compile": job.torch_compile,
        "router_aux_loss_coef": bool(job.router_aux_loss_coef),
        "lora use_dora": bool(job.lora.get("use_dora")),
        "lora modules_to_save": bool(job.lora.get("modules_to_save")),
        "lora bias": job.lora.get("bias") not in (None, "none"),
    }
    check_others("tensor_parallel", others)


def check_pod(job: FineTuneOptions, on_pod: int) -> None:
    """Raise ConfigError if the `on_pod` ranks of a pod form no groups of `tensor_parallel` ranks.

    A group exchanges activations in every layer, so it must not cross the network between pods.
    """
    size = job.tensor_parallel
    if on_pod % size:
        has = f"{on_pod} ranks" if on_pod > 1 else "one rank"
        remedy = "drop tensor_parallel"
        if on_pod > 1:
            remedy = f"use a number that divides {on_pod}, or drop tensor_parallel"
        raise ConfigError(
            f"tensor_parallel is {size}, and a pod has {has}, one for each GPU; a group lies "
            f"within a pod. Ask for pods with a multiple of {size} GPUs, or {remedy}"
        )


def check_tensor_model(job: FineTuneOptions, config: Json) -> None:
    """Raise ConfigError if ranks cannot share the weights of a model with a configuration."""
    size = job.tensor_parallel
    if size == 1:
        return
    config = language_of(config)
    check_heads("tensor_parallel", config, size, may_lack=True)
    inner = as_int(config.get("intermediate_size")) or 0
    if inner % size:
        raise ConfigError(
            f"tensor_parallel is {size}, and intermediate_size of the model is {inner}; use a "
            f"number that divides {inner}"
        )
    if has_experts(config):
        raise ConfigError(
            "tensor_parallel does not support mixtures of experts; use 'zero3' or 'fsdp' without "
            "tensor_parallel"
        )
