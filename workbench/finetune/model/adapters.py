"""Adapters: small matrices trained beside a model whose own weights stay as they are (LoRA), or in 4 bits (QLoRA)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.utils import logging as transformers_logging

from workbench.agent.rank import collectives as ranks
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import with_lora
from workbench.finetune.model.load import Loaded, trained_dtype
from workbench.finetune.model.saving import whole
from workbench.finetune.options.adapters import Lora
from workbench.finetune.options.choices import Peft, Precision
from workbench.finetune.options.models import TINY_LLAMA, TINY_T5

WEIGHTS, _NAME = "adapter_model.safetensors", "default"


def load_options(peft: str, precision: str, *, sharded: bool = False) -> Mapping[str, Any]:
    """Return how `from_pretrained` loads weights in 4 bits, and the others in the format of the arithmetic.

    Those that are `sharded` are stored in the format that FSDP gathers.
    """
    if peft != Peft.QLORA:
        return {}
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "peft 'qlora' needs bitsandbytes, which this pod lacks: pip install 'bitsandbytes>=0.50', "
            "or choose peft 'lora'"
        )
    # On CPUs with AVX512-BF16 a layer would repack its weights when it is first asked, round their scales to bf16, and
    # pass no gradient on ever after; and training begins after the first evaluation. Held by a test.
    # https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L613
    vars(import_module("bitsandbytes.nn.modules"))["has_avx512bf16"] = lambda: False
    computed = torch.bfloat16 if precision == Precision.BF16 else torch.float32
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        bnb_4bit_quant_storage=computed if sharded else torch.uint8,
    )
    # The whole model may be more than one GPU holds: FSDP brings it there layer by layer.
    device = torch.cuda.current_device() if torch.cuda.is_available() and not sharded else "cpu"
    return {"quantization_config": config, "device_map": {"": device}, "dtype": computed}


def attached(loaded: Loaded, job: FineTune) -> Loaded:
    """Put fresh adapters beside a model, which is frozen; the same on every rank. A job without adapters: as it was."""
    if job.peft == Peft.NONE:
        return loaded
    loaded = _with_adapters(loaded, job)
    _hold_trained(loaded.model, trained_dtype(job))
    return loaded


def _with_adapters(loaded: Loaded, job: FineTune) -> Loaded:
    _say_nothing_of_old_names()
    options = Lora.from_dict(job.lora)
    torch.manual_seed(job.seed)
    if options.resume_from:
        from peft.peft_model import (
            PeftModel,
        )  # the package itself may be a stand-in that nothing was asked of yet

        if job.gradient_checkpointing:
            loaded.model.enable_input_require_grads()
        return replace(
            loaded,
            model=PeftModel.from_pretrained(loaded.model, options.resume_from, is_trainable=True),
        )
    try:
        return replace(
            loaded, model=with_lora(loaded.model, options, checkpointing=job.gradient_checkpointing)
        )
    except ValueError as error:
        raise ConfigError(
            f"lora target_modules {options.target_modules!r} do not fit {job.model!r}: {error}"
        ) from error


def _hold_trained(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Put what is trained into its number format; peft makes adapters in FP32, and biases are the model's own."""
    for module in model.modules():
        own = [
            p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")
        ]  # which ZeRO-3 has cut up
        if not any(p.requires_grad for p in own):
            continue
        for parameter in own:
            # A norm whose bias is trained computes with its weight in the same format.
            if parameter.requires_grad or parameter.dim() == 1:
                parameter.data = parameter.data.to(dtype)


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """Count the parameters that are trained and all of them, whole, however they are held."""
    trained = everything = 0
    # Of 4 bits: several in a number, padded.
    states = {
        id(m.weight): m.quant_state
        for m in model.modules()
        if getattr(m, "quant_state", None) is not None
    }
    for parameter in model.parameters():
        state: Any = states.get(id(parameter))
        shape = (
            state.shape if state is not None else getattr(parameter, "ds_shape", parameter.shape)
        )
        count = torch.Size(shape).numel()
        everything += count
        trained += count if parameter.requires_grad else 0
    return trained, everything


def save(model: Any, folder: Path, *, base: str, seed: int) -> None:
    """Save the adapters alone; every rank must call it, and rank 0 writes."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = {
        name: value for name, p in model.named_parameters() if p.requires_grad for value in whole(p)
    }
    if ranks.rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=_NAME, save_embedding_layers=False
    )
    save_file(
        {name: value.contiguous() for name, value in kept.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config = model.peft_config[_NAME]
    shown = copy(config)
    shown.base_model_name_or_path, shown.inference_mode = base, True
    if base in (TINY_T5, TINY_LLAMA):
        shown.revision = f"seed-{seed}"  # of the weights that they belong to
    shown.save_pretrained(str(folder))


def load_with_adapter(folder: str | Path, base: Loaded) -> Loaded:
    """Put saved adapters onto their base, to answer; nothing is trained any more."""
    if not (Path(folder) / WEIGHTS).is_file():
        return base
    from peft import PeftModel

    _say_nothing_of_old_names()
    return replace(base, model=PeftModel.from_pretrained(base.model, str(folder)))


def merged(folder: str | Path, base: Loaded) -> Loaded:
    """Add saved adapters to the weights of their base."""
    if getattr(base.model, "is_loaded_in_4bit", False):
        with _quiet():
            # The other weights were held in the format of the arithmetic.
            base = replace(base, model=base.model.dequantize(dtype=torch.float32).float())
    return replace(base, model=load_with_adapter(folder, base).model.merge_and_unload())


def _say_nothing_of_old_names() -> None:
    # peft 0.21 asks transformers 5 by a name that it has given another; every rank would say so.
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )


@contextmanager
def _quiet() -> Iterator[None]:
    # Without a warning that the weights are as wide as was asked for.
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
