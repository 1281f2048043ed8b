"""Attention of a model on a GPU, if the job leaves it open."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune

_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", (8, 0)),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", (9, 0)),
}
"""Module, package and the least compute capability of an attention of a package."""


def use_attention(model: Any, job: FineTune, *, gpus: int) -> str:
    """Choose the attention of a loaded model, and return a note on the choice. Empty: none.

    Raises:
        ConfigError: The job asks for an attention that this pod cannot run.
    """
    if job.attn_implementation is not None:
        _check(str(job.attn_implementation))
        return ""
    if not gpus:
        return ""
    own = str(model.config._attn_implementation)
    capability = torch.cuda.get_device_capability()
    name = choice(model, job, flash=_lack("flash_attention_2", capability) == "")
    if name != own:
        model.set_attn_implementation(name)
        return f"attention {name} in place of {own}: attn_implementation is left open"
    if job.packs and own in ("sdpa", "eager"):
        return (
            f"{own} computes packed rows under a dense mask, at the cost of their length squared. "
            "flash-attn on the pods, or a model with flex_attention, costs less"
        )
    return ""


def choice(model: Any, job: FineTune, *, flash: bool) -> str:
    """Return the attention for a GPU; `flash` is whether the pod can run flash-attn.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(_attn_implementation="sdpa")
        >>> llama = SimpleNamespace(
        ...     config=config, _supports_flash_attn=True, _supports_flex_attn=True
        ... )
        >>> job = FineTune(model="tiny-llama", precision="bf16")
        >>> choice(llama, job, flash=True), choice(llama, job, flash=False)
        ('flash_attention_2', 'sdpa')
        >>> choice(llama, job.replace(packing=True), flash=False)
        'flex_attention'
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = str(base.config._attn_implementation)
    # An attention of the model's configuration is its maker's choice.
    if own != "sdpa" or job.sequence_parallel > 1:
        return own
    half = job.number_format in ("bf16", "fp16")
    if flash and half and getattr(base, "_supports_flash_attn", False):
        return "flash_attention_2"
    if job.packs and getattr(base, "_supports_flex_attn", False):
        return "flex_attention"
    return own


def _check(name: str) -> None:
    if name not in _PACKAGES:
        return
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    lack = _lack(name, capability)
    if lack:
        raise ConfigError(f"attn_implementation {name!r} needs {lack}")


def _lack(name: str, capability: tuple[int, int]) -> str:
    """Return what this pod lacks for an attention of a package. Empty: nothing."""
    module, package, least = _PACKAGES[name]
    if find_spec(module) is None:
        return f"the package {package}, which this pod lacks; install it, or use 'sdpa'"
    if capability < least:
        return f"a GPU of compute capability {least[0]}.{least[1]} or later; use 'sdpa'"
    return ""
