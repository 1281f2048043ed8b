"""Weights that adapters are put on: found by name before peft, and compared with peft's result.

peft ignores names without a module beside names with one. For some mixtures of experts it rewrites
the names, and then leaves out linear layers outside the experts. peft adds the product of an
adapter to the output of a linear layer, so a layer with another output is adapted by its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from workbench.base.errors import ConfigError, one_of
from workbench.finetune.options.adapters import ALL_LINEAR, Lora

# Modules of state space layers. peft refuses the first, because their kernels read its weight.
_STATE_SPACES = ("Mamba", "FalconH1", "NemotronH")
_BYPASSED = ("out_proj", "dt_proj")
_PREFIX = "base_model.model."
_HEADS = ("score", "classifier")
_WEIGHT = ".weight"
_FAMILIES = "transformers.models."


def linear_weights(model: Any) -> list[str]:
    """Return the names of all weights of linear layers, except those of the output layer.

    The stacked weights of experts and the weights of routers are among them.
    """
    head = model.get_output_embeddings()
    names = []
    for name, module in model.named_modules():
        if module is head or name in _HEADS:
            continue
        kind = type(module).__name__
        if isinstance(module, nn.Linear | Conv1D):
            names.append(f"{name}{_WEIGHT}")
        elif "Router" in kind or "Gate" in kind:
            names += [f"{name}.{own}" for own in _own(module, 2) if own == "weight"]
    return names + stacked_weights(model)


def bypassed_weights(model: Any) -> set[str]:
    """Return the names of weights that the model reads without calling their module.

    An adapter would have no effect there.
    """
    names: set[str] = set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        # The experts of DBRX, in matrices of all experts, are cut apart outside of their module.
        names.update(f"{name}.{own}" for own in _own(module, 2) if "Expert" in kind)
        if hasattr(module, "conv1d") and any(each in kind for each in _STATE_SPACES):
            own = [each for each in _BYPASSED if hasattr(module, each)]
            names.update(f"{name}.{each}{_WEIGHT}" for each in own)
    return names


def other_outputs(model: Any) -> set[str]:
    """Return the names of weights whose module returns something else than peft expects.

    Routers that return scores and logits are among them, layers of groups, and tables of positions
    that read no ids.
    """
    names = set()
    for name, module in model.named_modules():
        is_other = isinstance(module, nn.Linear) and not _returns_product(module)
        if is_other or _reads_no_ids(module):
            names.add(f"{name}{_WEIGHT}")
    return names


def _reads_no_ids(module: nn.Module) -> bool:
    """Return whether a table computes its own positions, as those of OPT and BART."""
    own = type(module).forward is not nn.Embedding.forward
    # peft knows embeddings with a scale.
    return isinstance(module, nn.Embedding) and own and not hasattr(module, "embed_scale")


def _returns_product(layer: nn.Linear) -> bool:
    kind = type(layer)
    if kind.forward is nn.Linear.forward or not kind.__module__.startswith(_FAMILIES):
        return True
    # Try the layer's own code without memory: ranks may have shards of the weight only.
    trial = copy(layer)
    trial._parameters = {}
    sizes = {"weight": (layer.out_features, layer.in_features), "bias": (layer.out_features,)}
    for name, parameter in layer._parameters.items():
        if parameter is not None:
            parameter = nn.Parameter(torch.empty(sizes[name], device="meta"))
        trial._parameters[name] = parameter
    trial.training = False
    try:
        output = kind.forward(trial, torch.empty(2, layer.in_features, device="meta"))
    except RuntimeError:
        # A layer of groups reads inputs of more dimensions.
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, layer.out_features)


def stacked_weights(model: Any) -> list[str]:
    """Return the names of the stacked weights of experts."""
    names = []
    for name, module in model.named_modules():
        if "Expert" in type(module).__name__:
            names += [f"{name}.{own}" for own in _own(module, 2, 3)]
    return names


def _own(module: nn.Module, *dimensions: int) -> Iterator[str]:
    for name, parameter in module.named_parameters(recurse=False):
        # ZeRO-3 keeps the shape beside an empty tensor.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) in dimensions and not name.endswith("bias"):
            yield name


def wanted_weights(model: Any, options: Lora) -> set[str]:
    """Return the names of the weights that the options ask adapters for.

    Raises:
        ConfigError: A name fits no weight.
    """
    renamed = _renamed(model)
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    wanted: set[str] = set()
    if options.target_modules == ALL_LINEAR:
        wanted.update(linear_weights(model))
    else:
        for name in options.target_modules:
            ends = [f"{name}{_WEIGHT}", name, *filter(None, [renamed.get(name)])]
            found = {weight for weight in every if any(_ends(weight, end) for end in ends)}
            # peft refuses a module of other modules by itself.
            if not found and not any(_ends(full, name) for full, _ in model.named_modules()):
                raise one_of("lora target_modules: the module", name, _known(model, renamed))
            wanted |= found
    for name in options.target_parameters:
        found = {weight for weight in every if _ends(weight, name)}
        if not found:
            known = {_last(weight, 2) for weight in linear_weights(model)}
            raise one_of("lora target_parameters: the weight", name, sorted(known))
        wanted |= found
    return wanted


def complete(model: Any, config: Any, wanted: Collection[str], options: Lora) -> None:
    """Add to peft's configuration the weights that peft would leave out, as parameters."""
    modules = [full for full, _ in model.named_modules()]
    renamed = _renamed(model)
    if options.target_modules != ALL_LINEAR:
        kept = []
        for name in options.target_modules:
            if name in renamed or any(_ends(full, name) for full in modules):
                kept.append(name)
        config.target_modules = kept
    others = {weight.removesuffix(_WEIGHT) for weight in other_outputs(model)}
    if others:
        config.exclude_modules = sorted({*(config.exclude_modules or ()), *others})
    trial = deepcopy(config)
    _rewrite(trial, model)
    left = set(wanted) - _reached(model, trial)
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if left:
        config.target_parameters = [*options.target_parameters, *_shortest(left, every)]
    if not (left or trial.target_parameters):
        return
    # peft has neither for weights outside of linear layers.
    for name, given in {"dropout": options.dropout, "use_dora": options.use_dora}.items():
        if given:
            first = min(left or set(wanted) & set(stacked_weights(model)) or wanted)
            raise ConfigError(
                f"lora {name} is {given!r}, and {name} is not offered for adapters of weights such "
                f"as {first}. Drop {name}, or name target_modules without these weights"
            )


def adapted_weights(model: Any) -> set[str]:
    """Return the names of the weights with an adapter, as the model without adapters has them."""
    names = set()
    for name, module in model.named_modules():
        inside = getattr(module, "lora_A", None), getattr(module, "lora_embedding_A", None)
        if hasattr(module, "base_layer") and any(inside):
            parameter = getattr(module, "parameter_name", "weight")
            names.add(f"{plain_name(name)}.{parameter}")
    return names


def left_out(model: Any) -> list[str]:
    """Return the names of the weights of linear layers without an adapter."""
    adapted = adapted_weights(model)
    left = []
    for name in linear_weights(model.get_base_model()):
        # Adapters are linear layers too, and modules that are trained as a whole are copies.
        parts = name.split(".")
        inner = any("lora_" in part or part == "modules_to_save" for part in parts)
        whole = "original_module" in parts
        if not (inner or whole) and plain_name(name) not in adapted:
            left.append(plain_name(name))
    return left


def plain_name(name: str) -> str:
    """Return the name of a module or a weight without the parts that peft adds."""
    return name.removeprefix(_PREFIX).replace(".base_layer", "")


def _reached(model: Any, config: Any) -> set[str]:
    """Return the weights that peft puts adapters on."""
    found: set[str] = set()
    excluded = {f"{name}{_WEIGHT}" for name in config.exclude_modules or ()}
    if config.target_modules == ALL_LINEAR:
        for name in linear_weights(model):
            module = (
                model.get_submodule(name.removesuffix(_WEIGHT)) if name.endswith(_WEIGHT) else None
            )
            if isinstance(module, nn.Linear | Conv1D):
                found.add(name)
    else:
        for full, _ in model.named_modules():
            if any(_ends(full, name) for name in config.target_modules or ()):
                found.add(f"{full}{_WEIGHT}")
    found -= excluded
    for name, _ in model.named_parameters(remove_duplicate=False):
        if any(_ends(name, end) for end in config.target_parameters or ()):
            found.add(name)
    return found


def _rewrite(config: Any, model: Any) -> None:
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model, None)


def _renamed(model: Any) -> Mapping[str, str]:
    """Return the weights that peft takes for the names of earlier versions of transformers."""
    from peft.utils import transformers_weight_conversion as conversion

    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    mapping: Mapping[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(family, {})
    return mapping


def _known(model: Any, renamed: Mapping[str, str]) -> Sequence[str]:
    names = {_last(name.removesuffix(_WEIGHT), 1) for name in linear_weights(model)}
    return sorted({name for name in names | set(renamed) if not name.isdigit()})


def _shortest(names: Collection[str], every: Sequence[str]) -> list[str]:
    """Return ends of names that fit the given names, and no others."""
    others = [name for name in every if name not in names]
    short = set()
    for name in names:
        end = name
        for count in range(2, name.count(".") + 1):
            end = _last(name, count)
            if not any(_ends(other, end) for other in others):
                break
        else:
            end = name
        short.add(end)
    return sorted(short)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _last(name: str, count: int) -> str:
    return ".".join(name.split(".")[-count:])
