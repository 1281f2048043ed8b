"""Changes to a model for training and for the trace alike: recomputed layers and adapters.

The trace uses the module too, and must load little.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import Lora


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Make layers of the given classes recompute their activations in the backward pass."""
    # Replace only the layers' forward: weights keep their names, and hooks that gather a layer's
    # weights run as before.
    for layer in named_layers(model, names, "checkpoint_layers") if names else ():
        layer.forward = partial(_forward, layer, layer.forward)


def _forward(layer: nn.Module, forward: Any, *args: Any, **options: Any) -> Any:
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)


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
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    return get_peft_model(model, config)
