"""Changes to a model for training and for the trace alike: recomputed layers and adapters.

The trace uses the module too, and must load little.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.model.targets import (
    adapted_weights,
    bypassed_weights,
    complete,
    wanted_weights,
)
from workbench.finetune.model.tied import Owners, check_alone, tied_weights
from workbench.finetune.options.adapters import ALL_LINEAR, Lora
from workbench.finetune.options.options import FineTuneOptions

_FP8 = (8, 9)
"""Compute capability of the first GPUs with FP8."""
_FP8_MULTIPLE = 16
"""Multiple of the sizes of a matrix product in FP8."""


def recompute(model: Any, names: Sequence[str], policy: str | None = None) -> None:
    """Make layers of the given classes recompute their activations in the backward pass.

    Without names and with a policy, the layers are the model's transformer layers.
    """
    if policy is not None and not names:
        names = transformer_layers(model)
        if not names:
            raise ConfigError(
                f"a {type(model).__name__} does not name its transformer layers. Name them by "
                "checkpoint_layers, or drop checkpoint_policy"
            )
    # Replace only the layers' forward: weights keep their names, and hooks that gather a layer's
    # weights run as before.
    for layer in named_layers(model, names, "checkpoint_layers") if names else ():
        layer.forward = partial(_forward, layer, layer.forward, policy)


def _forward(layer: nn.Module, forward: Any, policy: str | None, *args: Any, **options: Any) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **options)
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(_matmuls()))
    return checkpoint(forward, *args, use_reentrant=False, **options)


@cache
def _matmuls() -> Sequence[Any]:
    """Return the operations whose outputs `CheckpointPolicy.MATMULS` keeps.

    The scores of unfused attention are a `bmm`. Its output is large and cheap to recompute.
    """
    aten = torch.ops.aten
    names = (
        "mm",
        "addmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    return [getattr(aten, name).default for name in names]


def check_liger(model: Any, job: FineTuneOptions) -> None:
    """Raise ConfigError if Liger's kernels were asked for and cannot be used."""
    if not job.training.get("use_liger_kernel"):
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "training 'use_liger_kernel' needs the package liger-kernel on the pods. Ask for it by "
            "PodSpec(pip=['liger-kernel'])"
        )
    # transformers would leave an unknown family as it is, without a word.
    kernels: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    family = model.config.model_type
    if family not in kernels.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"training 'use_liger_kernel': Liger has no kernels for a {family!r}. Drop it"
        )


def use_float8(model: Any, *, gpus: int) -> None:
    """Let the linear layers of a model compute in FP8, apart from the output layer.

    Raises:
        ConfigError: The pod lacks torchao or FP8, or no layer fits.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "float8 needs the package torchao on the pods. Ask for it by PodSpec(pip=['torchao'])"
        )
    capability = torch.cuda.get_device_capability() if gpus else _FP8
    if capability < _FP8:
        has = ".".join(map(str, capability))
        raise ConfigError(
            "float8 needs GPUs with FP8, of compute capability 8.9 (Ada, Hopper) or later, and "
            f"this GPU has {has}; drop float8"
        )
    output = model.get_output_embeddings()
    fitting = []

    def fits(layer: Any, name: str) -> bool:
        shape = (layer.in_features, layer.out_features)
        if layer is output or any(size % _FP8_MULTIPLE for size in shape):
            return False
        fitting.append(name)
        return True

    library: Any = importlib.import_module("torchao.float8")
    # A micro-batch has any number of tokens: torchao pads the number to the multiple.
    config = library.Float8LinearConfig(emulate=not gpus, pad_inner_dim=True)
    library.convert_to_float8_training(model, config=config, module_filter_fn=fits)
    if not fitting:
        raise ConfigError(
            "float8 is for linear layers whose sizes are multiples of "
            f"{_FP8_MULTIPLE}, and the model has none; drop float8"
        )


def transformer_layers(model: Any) -> list[str]:
    """Return the class names of a model's transformer layers; empty if the model names none."""
    there = {type(module).__name__ for module in model.modules()}
    named = there & set(getattr(model, "_no_split_modules", None) or ())
    if named:
        return sorted(named)
    # Pegasus and others name none. Each layer of transformers has this base class.
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    return sorted({type(layer).__name__ for layer in layers})


def named_layers(model: nn.Module, names: Sequence[str], option: str) -> list[nn.Module]:
    """Return the modules of the given classes. `option` is the name of the option in messages."""
    layers = [module for module in model.modules() if type(module).__name__ in names]
    missing = set(names) - {type(layer).__name__ for layer in layers}
    if missing or not layers:
        names_there = sorted({type(module).__name__ for module in model.modules()})
        what = f"{option} names {', '.join(sorted(missing))}" if missing else f"{option} is empty"
        raise ConfigError(
            f"{what}, and the model consists of "
            f"{', '.join(names_there)}; name its transformer layers"
        )
    return layers


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Return the trained matrices of the hidden layers, each once.

    Embeddings, the output layer, other heads, and tensors of more than two dimensions are none.
    """
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    output = model.get_output_embeddings()
    if output is not None:
        outer.append(output)
    # A tied output layer has the weight of an embedding.
    others = {id(weight) for module in outer for weight in module.parameters()}
    return [
        weight
        for weight in model.base_model.parameters()
        if weight.dim() == 2 and weight.requires_grad and id(weight) not in others
    ]


def balance_coefficient(model: Any, asked: float | None) -> float | None:
    """Return the weight of a mixture's load-balancing loss: the job's, or else the model's own.

    None for a model whose forward pass cannot return the loss.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # beneath adapters
    config = base.config.get_text_config()
    returned = "output_router_logits" in inspect.signature(type(base).forward).parameters
    own = getattr(config, "router_aux_loss_coef", None)
    if own is None or not returned or config.is_encoder_decoder:
        if asked:
            raise ConfigError(
                f"router_aux_loss_coef is {asked}, and a {type(base).__name__} "
                "returns no load-balancing loss. Drop it"
            )
        return None
    return float(own if asked is None else asked)


def with_lora(model: Any, options: Lora, *, checkpointing: bool) -> Any:
    """Freeze a model and add new adapters. A ValueError means that no module has the names."""
    from peft import LoraConfig, get_peft_model

    names = options.target_modules
    owners = tied_weights(model)
    saved = modules_to_save(model, options.modules_to_save, owners)
    wanted = wanted_weights(model, options)
    bypassed = wanted & bypassed_weights(model)
    if names == ALL_LINEAR:
        without = {weight for weight in wanted if weight in owners} | bypassed
        wanted -= without
    else:
        without = set()
        if bypassed:
            raise ConfigError(
                f"lora names {min(bypassed)}, which the model reads without calling its module, so "
                "an adapter has no effect. Drop the name"
            )
        check_alone(wanted, owners, "lora target_modules names")
    if checkpointing:
        # No part before the first adapter has a gradient: recomputing would cut the graph there.
        model.enable_input_require_grads()
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        bias=options.bias,
        target_modules=names if isinstance(names, str) else list(names),
        exclude_modules=sorted(weight.rpartition(".")[0] for weight in without) or None,
        modules_to_save=saved or None,
        task_type=_task_type(model),
    )
    complete(model, config, wanted, options)
    adapted = get_peft_model(model, config)
    missing = sorted(wanted - adapted_weights(adapted))
    if missing and names != ALL_LINEAR:
        raise ConfigError(
            f"lora target_modules {names!r}: peft puts no adapter on {', '.join(missing[:3])}. "
            "Name other modules"
        )
    return adapted


def leave_casts_to_autocast(model: nn.Module) -> None:
    """Let autocast alone convert the inputs of adapters.

    peft would convert each input to the FP32 of the adapters, and autocast back to the half format.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            vars(module)["cast_input_dtype_enabled"] = False


def modules_to_save(model: nn.Module, names: Sequence[str], owners: Owners) -> list[str]:
    """Return the full names of the modules to train as a whole.

    peft ignores a name without a module, and takes every module whose name ends in the letters.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    found: list[str] = []
    for name in names:
        matches = [full for full in modules if full == name or full.endswith(f".{name}")]
        if not matches:
            ends = dict.fromkeys(full.rpartition(".")[2] for full in modules)
            raise one_of(
                "lora modules_to_save: the module", name, [e for e in ends if not e.isdigit()]
            )
        for full in matches:
            _check_whole(full, modules[full], owners)
        found += matches
    return list(dict.fromkeys(found))


def _check_whole(name: str, module: nn.Module, owners: Owners) -> None:
    children = [child for child, _ in module.named_children()]
    if children:
        raise ConfigError(
            f"lora modules_to_save names {name!r}, a module of {', '.join(children)}. Name "
            "the inner modules instead"
        )
    if not any(True for _ in module.parameters()):
        raise ConfigError(
            f"lora modules_to_save names {name!r}, a module without weights. Drop the name"
        )
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"lora modules_to_save names {name!r}, and weights in 4 bits cannot be trained as "
                "a whole. Use peft 'lora', or drop the name"
            )
    weights = [f"{name}.{own}" for own, _ in module.named_parameters()]
    check_alone(weights, owners, "lora modules_to_save names")


def _task_type(model: Any) -> str:
    if model.config.is_encoder_decoder:
        return "SEQ_2_SEQ_LM"
    # peft also trains and saves the new output of a model that scores texts.
    return "CAUSAL_LM" if model.can_generate() else "SEQ_CLS"
