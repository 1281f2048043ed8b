"""Tensor parallelism: a group of ranks shares the weights of the linear layers.

Only pods import this module, because the module loads torch.

The plan of a model in transformers (`tp_plan`) names the layers, and how each layer is cut. Layers
are cut into plain tensors. transformers itself makes DTensors, which neither DDP nor DeepSpeed's
ZeRO can train. A sum over the group completes the output of a `rowwise` layer in the forward pass,
and the gradient of a `colwise` layer's input in the backward pass
(https://arxiv.org/abs/1909.08053, section 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from workbench.base.errors import ConfigError

_COLUMNS = "colwise"
_ROWS = "rowwise"
_SUMMED = "replicated_with_grad_allreduce"
"""Style of a whole weight that reads the rank's part of the activations, such as a norm of heads.

The gradients of the ranks add up.
"""
_WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "replicate",
    "rowwise_rep",
    "rowwise_split_input",
)
"""Styles with whole inputs and whole outputs. Their weights stay whole."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Place of a rank's part in a whole weight."""

    dim: int
    size: int
    """Number of parts."""
    group: Any

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole weight. A collective of the group."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, self.dim)


def cut_of(parameter: Any) -> Cut | None:
    """Return the cut of a parameter. None: the parameter is whole."""
    cut: Cut | None = getattr(parameter, "cut", None)
    return cut


def whole_numel(parameter: Any) -> int:
    """Return the elements of a whole parameter."""
    cut = cut_of(parameter)
    return int(parameter.numel()) * (1 if cut is None else cut.size)


def styles_of(model: Any) -> dict[str, str]:
    """Return the styles of a model's modules by their names, without modules that stay whole.

    Raises:
        ConfigError: transformers has no plan for the model, or cuts it in another way.
    """
    kind = model.config.model_type
    plan = model.tp_plan or {}
    _check_plan(kind, plan)
    styles = {}
    for name, _ in model.named_modules():
        style = plan.get(_NUMBER.sub(".*", name))
        if style in (_COLUMNS, _ROWS, _SUMMED):
            styles[name] = style
    # The names of a plan may fit no module.
    _check_plan(kind, styles)
    return styles


def _check_plan(kind: str, plan: Mapping[str, str]) -> None:
    """Raise ConfigError if a plan cuts no layer of a model, or cuts layers in an unknown way."""
    unknown = set(plan.values()) - {_COLUMNS, _ROWS, _SUMMED, *_WHOLE}
    if unknown:
        raise ConfigError(
            f"tensor_parallel does not know how to cut a {kind!r}: its plan in transformers has "
            f"{', '.join(sorted(unknown))}. Drop tensor_parallel, or use 'zero3' or 'fsdp' instead"
        )
    if not {_COLUMNS, _ROWS} & set(plan.values()):
        raise ConfigError(
            f"transformers has no plan to cut the layers of a {kind!r}. Drop tensor_parallel, or "
            "use 'zero3' or 'fsdp' instead"
        )


class TensorParallel:
    """Linear layers of a model, shared by groups of neighbouring ranks.

    Every rank must create the object, after the process group is open.
    """

    def __init__(self, model: Any, size: int, *, gpus: int) -> None:
        """Cut a loaded model without adapters. Raise ConfigError for an unsupported model."""
        styles = styles_of(model)
        self.size = size
        mesh = init_device_mesh(
            "cuda" if gpus else "cpu",
            (dist.get_world_size() // size, size),
            mesh_dim_names=("data", "tensor"),
        )
        self.group = mesh.get_group("tensor")
        """Ranks that share the weights, and have the same rows."""
        self.data_group = mesh.get_group("data")
        """Ranks with the same part of the weights, and other rows."""
        self._place = mesh.get_local_rank("tensor")
        self._summed: list[nn.Parameter] = []
        for name, style in styles.items():
            module = model.get_submodule(name)
            if style == _SUMMED:
                self._summed += module.parameters()
            else:
                self._share(module, style, name)

    def complete(self, model: Any) -> None:
        """Cut the adapters of the layers too, and prepare the model for the engines."""
        for module in model.modules():
            base = getattr(module, "base_layer", None)
            cut = None if base is None else cut_of(base.weight)
            if cut is None:
                continue
            # The inner side of an adapter, of few numbers, stays whole.
            style, adapters = (_COLUMNS, module.lora_B) if cut.dim == 0 else (_ROWS, module.lora_A)
            for name, layer in adapters.items():
                self._share(layer, style, name)
        for parameter in self._summed:
            if parameter.requires_grad:
                parameter.register_hook(self._sum)  # type: ignore[no-untyped-call]
        # DeepSpeed would otherwise cut the layers once more.
        model.ds_autotp_parsed = True

    def _share(self, layer: Any, style: str, name: str) -> None:
        if type(layer).forward is not nn.Linear.forward:
            raise ConfigError(
                f"tensor_parallel cuts linear layers, and {name} is a {type(layer).__name__}. "
                "Drop tensor_parallel"
            )
        if style == _COLUMNS:
            self._cut(layer.weight, 0, name)
            if layer.bias is not None:
                self._cut(layer.bias, 0, name)
            layer.forward = partial(_columns, layer, self.group)
        else:
            self._cut(layer.weight, 1, name)
            layer.forward = partial(_rows, layer, self.group)

    def _cut(self, parameter: Any, dim: int, name: str) -> None:
        if parameter.shape[dim] % self.size:
            raise ConfigError(
                f"tensor_parallel is {self.size}, and {name} has {parameter.shape[dim]} features; "
                "use a number that divides the features"
            )
        # A copy, so that the memory of the whole weight is freed.
        parameter.data = parameter.data.chunk(self.size, dim)[self._place].clone(
            memory_format=torch.contiguous_format
        )
        parameter.cut = Cut(dim=dim, size=self.size, group=self.group)
        # DeepSpeed's norm counts other weights once for the group.
        parameter.tensor_model_parallel = True

    def _sum(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def replicated(self, model: Any, **options: Any) -> DistributedDataParallel:
        """Wrap a model for the exchange of gradients with the ranks of the same part."""
        return DistributedDataParallel(model, process_group=self.data_group, **options)

    def clip(self, parameters: Iterable[Any], limit: float) -> torch.Tensor:
        """Clip the gradients to a norm, and return their norm before. A collective."""
        parts: list[torch.Tensor] = []
        whole: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                (whole if cut_of(parameter) is None else parts).append(parameter.grad)
        squared = get_total_norm(parts).square()
        dist.all_reduce(squared, group=self.group)
        norm = squared.sqrt()
        if whole:
            norm = torch.hypot(norm, get_total_norm(whole))
        # The same formula as torch's clip_grad_norm_.
        torch._foreach_mul_([*parts, *whole], torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm


def _columns(layer: nn.Linear, group: Any, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(_sum_backward(hidden, group), layer.weight, layer.bias)


def _rows(layer: nn.Linear, group: Any, hidden: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _sum_forward(functional.linear(hidden, layer.weight), group)
    # Every rank has the whole bias, which counts once.
    return total if layer.bias is None else total + layer.bias.to(total.dtype)


class _SumForward(torch.autograd.Function):
    """Sum over a group of ranks. All ranks have the same gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        del ctx
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        del ctx
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """The same tensor, whose gradient is the sum over a group of ranks."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


_sum_forward: Any = _SumForward.apply
_sum_backward: Any = _SumBackward.apply
