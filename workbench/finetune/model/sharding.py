"""Parts of a model that FSDP shards separately: layers of a class, or parts of a size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from workbench.base.errors import ConfigError
from workbench.finetune.model.layers import named_layers, transformer_layers
from workbench.finetune.options.adapters import Fsdp


def parts_to_shard(model: Any, options: Fsdp) -> list[nn.Module]:
    """Return the parts to shard: the smallest parts of a size, or else the layers of a class."""
    if options.layer_parameters is not None:
        return parts_of(model, options.layer_parameters)
    return layers_of(model, options.layers)


def layers_of(model: Any, names: Sequence[str]) -> list[nn.Module]:
    layers = named_layers(model, names or transformer_layers(model), "fsdp layers")
    _check_nothing_is_tied(model, None, set(layers), {})
    return layers


def parts_of(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the smallest parts of a model with at least `least` parameters, without overlaps."""
    places = Counter(id(p) for each in model.modules() for p in each.parameters(recurse=False))
    parts: set[nn.Module] = set()

    def left(module: nn.Module) -> int:
        number = sum(p.numel() for p in module.parameters(recurse=False)) + sum(
            map(left, module.children())
        )
        shared = any(places[id(p)] > 1 for p in module.parameters())
        if (
            number < least
            or module is model
            or shared
            or isinstance(module, nn.ModuleList | nn.ModuleDict)
        ):
            return number
        parts.add(module)
        return 0

    left(model)
    return [module for module in model.modules() if module in parts]


def _check_nothing_is_tied(
    module: nn.Module,
    layer: nn.Module | None,
    layers: set[nn.Module],
    groups: dict[int, nn.Module | None],
) -> None:
    # torch raises the same error, but only in the first forward pass.
    layer = module if module in layers else layer
    for name, parameter in module.named_parameters(recurse=False):
        if groups.setdefault(id(parameter), layer) is not layer:
            names = sorted({type(each).__name__ for each in layers})
            raise ConfigError(
                f"fsdp layers {', '.join(names)} share the weight {name!r} of a "
                f"{type(module).__name__} with another part of the model, and a "
                "shared weight must be gathered as one; name smaller layers"
            )
    for child in module.children():
        _check_nothing_is_tied(child, layer, layers, groups)
