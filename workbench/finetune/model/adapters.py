"""Adapters: small matrices trained beside a frozen model (LoRA), also in 4 bits (QLoRA)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from workbench.agent.rank import collectives as ranks
from workbench.base.errors import ConfigError
from workbench.base.files.gate import library
from workbench.base.words import pluralize
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.files.opened import named_errors, quiet
from workbench.finetune.model.files.saving import whole
from workbench.finetune.model.layers import leave_casts_to_autocast, with_lora
from workbench.finetune.model.load import Loaded, trained_dtype
from workbench.finetune.model.targets import adapted_weights, left_out, stacked_weights
from workbench.finetune.model.tied import Owners, check_alone, tied_weights
from workbench.finetune.options.adapters import ALL_LINEAR, Lora
from workbench.finetune.options.model.folders import ADAPTERS
from workbench.finetune.options.model.models import TINY_LLAMA, TINY_T5
from workbench.finetune.options.refusals.adapters import unpacked
from workbench.finetune.techniques.on_pods.tensor import whole_numel
from workbench.finetune.techniques.registry import technique_of

WEIGHTS = "adapter_model.safetensors"
_NAME = "default"


def load_options(peft: str, precision: str, *, sharded: bool = False) -> Mapping[str, Any]:
    """Return options of `from_pretrained` for weights in 4 bits, others in the arithmetic's format.

    `sharded` weights are stored in the format that FSDP gathers.
    """
    if peft != "qlora":
        return {}
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "peft 'qlora' needs bitsandbytes, which this pod lacks: "
            "pip install 'bitsandbytes>=0.50', or choose peft 'lora'"
        )
    # On CPUs with AVX512-BF16 a layer would repack its weights at the first use, round their scales
    # to bf16, and never return a gradient again. Training begins after the first evaluation. A test
    # checks this.
    # https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py#L613
    vars(import_module("bitsandbytes.nn.modules"))["has_avx512bf16"] = lambda: False
    computed = torch.bfloat16 if precision == "bf16" else torch.float32
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=computed,
        bnb_4bit_quant_storage=computed if sharded else torch.uint8,
    )
    # The whole model may be larger than a GPU: FSDP moves the model there layer by layer.
    device = torch.cuda.current_device() if torch.cuda.is_available() and not sharded else "cpu"
    return {
        "quantization_config": config,
        "device_map": {"": device},
        "dtype": computed,
    }


def attached(loaded: Loaded, job: FineTune) -> Loaded:
    """Add new adapters to a model and freeze the model; the same on every rank.

    Without adapters in the job, return the model unchanged.
    """
    if job.peft == "none":
        return loaded
    if job.peft == "qlora" and stacked_weights(loaded.model):
        raise ConfigError(unpacked(job.model))
    owners = tied_weights(loaded.model)
    loaded = _with_adapters(loaded, job)
    options = Lora.from_dict(job.lora)
    if options.resume_from:
        # New adapters were checked before they were made.
        _check_adapted(loaded.model, owners, f"the adapters in {options.resume_from} adapt")
    _hold_trained(loaded.model, trained_dtype(job))
    if job.number_format in ("bf16", "fp16") and technique_of(job.technique).autocasts:
        leave_casts_to_autocast(loaded.model)
    left = left_out(loaded.model) if options.target_modules == ALL_LINEAR else []
    if not left:
        return loaded
    remark = (
        f"lora target_modules {ALL_LINEAR!r}: {pluralize(len(left), 'weight')} of linear layers"
        f" got no adapter: {', '.join(left[:3])}{'…' if len(left) > 3 else ''}"
    )
    return replace(loaded, remarks=[*loaded.remarks, remark])


def _with_adapters(loaded: Loaded, job: FineTune) -> Loaded:
    _say_nothing_of_old_names()
    options = Lora.from_dict(job.lora)
    torch.manual_seed(job.seed)
    if options.resume_from:
        if job.gradient_checkpointing:
            loaded.model.enable_input_require_grads()
        return replace(loaded, model=with_saved(loaded.model, options.resume_from, trains=True))
    try:
        return replace(
            loaded, model=with_lora(loaded.model, options, checkpointing=job.gradient_checkpointing)
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"lora target_modules {options.target_modules!r} do not fit {job.model!r}: {error}"
        ) from error


def _check_adapted(model: Any, owners: Owners, what: str) -> None:
    check_alone(adapted_weights(model), owners, what)


def _hold_trained(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert trained parameters to their number format: adapters start in FP32.

    Biases have the model's own format.
    """
    for module in model.modules():
        # ZeRO-3 has sharded parameters with a `ds_id`.
        own = [p for p in module.parameters(recurse=False) if not hasattr(p, "ds_id")]
        if not any(p.requires_grad for p in own):
            continue
        for parameter in own:
            # A norm whose bias is trained computes with its weight in the same format.
            if parameter.requires_grad or parameter.dim() == 1:
                parameter.data = parameter.data.to(dtype)


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """Count the trained and all parameters, whole, in any storage format."""
    trained = 0
    everything = 0
    # Weights in 4 bits share numbers, and are padded.
    states: dict[int, Any] = {}
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        if state is not None:
            states[id(module.weight)] = state
    for parameter in model.parameters():
        state = states.get(id(parameter))
        # ZeRO-3 leaves an empty tensor, and keeps the whole shape beside it.
        count = whole_numel(parameter)
        shape = getattr(parameter, "ds_shape", None) if state is None else state.shape
        if shape is not None:
            count = torch.Size(shape).numel()
        everything += count
        if parameter.requires_grad:
            trained += count
    return trained, everything


def save(model: Any, folder: Path, *, base: str, seed: int, revision: str | None = None) -> None:
    """Save only the adapters; every rank must call the function, and rank 0 writes."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for value in whole(parameter):
                state[name] = value
    if ranks.rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept = get_peft_model_state_dict(
        model,
        state_dict=state,
        adapter_name=_NAME,
        save_embedding_layers=False,
    )
    save_file(
        {name: value.contiguous() for name, value in kept.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config = model.peft_config[_NAME]
    shown = copy(config)
    shown.base_model_name_or_path = base
    shown.inference_mode = True
    # Revision of the base model's weights.
    shown.revision = revision
    if base in (TINY_T5, TINY_LLAMA):
        shown.revision = f"seed-{seed}"
    shown.save_pretrained(str(folder))


def load_with_adapter(folder: str | Path, base: Loaded) -> Loaded:
    """Load saved adapters onto their base model for answers, without training."""
    if not (Path(folder) / WEIGHTS).is_file():
        return base
    _say_nothing_of_old_names()
    return replace(base, model=with_saved(base.model, library(folder)))


def with_saved(model: Any, folder: str, *, trains: bool = False) -> Any:
    """Return a model with saved adapters. Raises ConfigError for adapters of another model.

    peft begins adapters that the file lacks at random, and drops others without a word.
    """
    # The package itself may be a lazy stand-in.
    from peft.peft_model import PeftModel

    try:
        with named_errors(folder):
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=trains)
    except RuntimeError as error:
        sizes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if not sizes:
            raise
        raise ConfigError(
            f"the adapters in {folder} have other sizes than {ADAPTERS} and the base: {sizes[0]} "
            "Give the base that the adapters were trained on"
        ) from error
    # Only a second reading returns the differences.
    read = adapted.load_adapter(folder, _NAME, is_trainable=trains)
    for names, what in ((read.missing_keys, "lacks"), (read.unexpected_keys, "has")):
        if names:
            raise ConfigError(
                f"the adapters in {folder} do not fit {ADAPTERS} and the base: the file of weights "
                f"{what} {pluralize(len(names), 'weight')} such as {min(names)}. Copy the folder "
                "again, or give the base that the adapters were trained on"
            )
    return adapted


def merged(folder: str | Path, base: Loaded) -> Loaded:
    """Merge saved adapters into the weights of their base model."""
    owners = tied_weights(base.model)
    if getattr(base.model, "is_loaded_in_4bit", False):
        # Without the warning that the weights are already as wide as requested.
        with quiet():
            # The other weights have the format of the arithmetic.
            base = replace(base, model=base.model.dequantize(dtype=torch.float32).float())
    model = load_with_adapter(folder, base).model
    # Adapters that this package did not make: merged into one name, they would change the other.
    _check_adapted(model, owners, f"the adapters in {folder} adapt")
    return replace(base, model=model.merge_and_unload())


def _say_nothing_of_old_names() -> None:
    # peft 0.21 uses an old name of transformers 5; every rank would warn.
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )
