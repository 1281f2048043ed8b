"""State of a rank after a step, counted on the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workbench.agent.rank import collectives as ranks
from workbench.finetune.techniques.on_pods.tensor import whole_numel
from workbench.finetune.techniques.registry import TECHNIQUES
from workbench.finetune.techniques.technique import Technique


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Part of some tensors on the rank."""

    local: int
    """Elements on the rank."""
    whole: int
    """Elements of the whole."""
    dtypes: tuple[str, ...] = ()
    """Number formats on the rank, by torch's names."""
    devices: tuple[str, ...] = ()
    """Devices of the part: `cpu`, `cuda`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    engine: str
    world_size: int
    parameters: Share
    """The model's weights between steps, frozen weights included."""
    trained: Share
    gradients: Share
    """Gradients at the update, averaged over the ranks."""
    updated: Share
    """Weights that the rank's optimizer updates: the master copy, if any."""
    states: Share
    """States of the optimizer for all updated elements; none for SGD without momentum."""
    arithmetic: str
    """Most frequent number format of the linear layers' results."""
    offload: tuple[str, ...] = ()
    """Parts of the state on the host: `optimizer`, `parameters`."""
    packed: bool = False
    """Whether some weights are stored in 4 bits."""
    packed_share: float = 0.0
    """Share of the frozen weights that is stored in 4 bits, by number of weights."""
    frozen: Share = field(default_factory=lambda: Share(local=0, whole=0))
    """Weights without training, without weights in 4 bits."""


def engine_of(trainer: Any) -> str:
    """Return the name of the model's engine: a technique's engine, `none`, or `deepspeed-zero0`."""
    technique = _running(trainer)
    if technique is not None:
        return technique.engine
    return "none" if getattr(trainer, "deepspeed", None) is None else "deepspeed-zero0"


def _running(trainer: Any) -> Technique | None:
    """Return the technique whose engine runs the model; None if no technique's does."""
    for technique in TECHNIQUES:
        if technique.runs(trainer):
            return technique
    return None


def gradients_of(trainer: Any) -> Share:
    """Count the gradients, right before the optimizer uses them."""
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    engine = getattr(trainer, "deepspeed", None)
    if engine is None:
        gradients = [p.grad for p in trained if p.grad is not None]
        return _share(gradients, whole=_whole(trained))
    # At the update DeepSpeed 0.19.8 has already freed the parameters' own gradients, also under
    # stage 1. It keeps the rank's part of the averages, with offload beside the master copy.
    held = [p.grad for p in _masters(engine.optimizer) if p.grad is not None]
    averaged = getattr(engine.optimizer, "averaged_gradients", {})
    for group in averaged.values():
        if isinstance(group, torch.Tensor):
            held.append(group)
        else:
            held.extend(group or ())
    return _share(held, whole=_whole(trained))


def state_of(trainer: Any, *, gradients: Share, arithmetic: str) -> RankState:
    every = list(trainer.model.parameters())
    trained = [p for p in every if p.requires_grad]
    engine = getattr(trainer, "deepspeed", None)
    optimizer = trainer.optimizer if engine is None else engine.optimizer
    # The wrappers of accelerate and DeepSpeed both keep the wrapped optimizer under this name.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    masters: list[torch.Tensor] = []
    files: dict[int, torch.Tensor] = {}
    if engine is not None:
        masters = _masters(engine.optimizer)
    technique = _running(trainer)
    if technique is not None:
        files = technique.tensors_in_files(trainer)
    # The optimizer updates the master copy if there is one, else the weights themselves.
    to_update = [files.get(id(master), master) for master in masters]
    if not to_update:
        for group in optimizer.param_groups:
            to_update.extend(group["params"])
    updated = _share(to_update, whole=_whole(trained))
    states = _share(_states(optimizer, files), whole=0)
    # Not a whole number where groups of weights have other numbers of states, as under Muon.
    per_element = states.local / max(1, updated.local)
    packed: dict[int, int] = {}
    for module in trainer.model.modules():
        quantized = getattr(module, "quant_state", None)
        if quantized is not None:
            packed[id(module.weight)] = torch.Size(quantized.shape).numel()
    frozen = [p for p in every if not p.requires_grad and id(p) not in packed]
    in_4_bits = sum(packed.values())
    wide = _whole(frozen)
    return RankState(
        engine=engine_of(trainer),
        world_size=ranks.world_size(),
        parameters=_share(every, whole=_whole(every)),
        trained=_share(trained, whole=_whole(trained)),
        gradients=gradients,
        updated=updated,
        states=replace(states, whole=round(per_element * updated.whole)),
        arithmetic=arithmetic,
        offload=_offload(engine),
        packed=bool(packed),
        packed_share=round(in_4_bits / max(1, in_4_bits + wide), 4),
        frozen=_share(frozen, whole=wide),
    )


def _masters(optimizer: Any) -> list[torch.Tensor]:
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return []


def _states(optimizer: Any, files: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter, state in optimizer.state.items():
        parameter = files.get(id(parameter), parameter)
        size = _local(parameter).numel()
        for kept in state.values():
            value = files.get(id(kept), kept)
            if not isinstance(value, torch.Tensor):
                continue
            # A step counter is a tensor too, and the scales of 8-bit states are smaller than the
            # states.
            if size > 1 and _local(value).numel() == size:
                yield value


def _offload(engine: Any) -> tuple[str, ...]:
    if engine is None:
        return ()
    parts = {
        "optimizer": engine.zero_offload_optimizer(),
        "parameters": engine.zero_offload_param(),
    }
    offloaded = []
    for name, part in parts.items():
        if part is not None and str(part.device) not in ("none", ""):
            offloaded.append(name)
    return tuple(offloaded)


def _local(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    shard = getattr(tensor, "ds_tensor", None)
    local: torch.Tensor = tensor if shard is None else shard
    return local


def _whole(tensors: Iterable[Any]) -> int:
    return sum(int(getattr(t, "ds_numel", whole_numel(t))) for t in tensors)


def _share(tensors: Iterable[Any], *, whole: int) -> Share:
    size = 0
    dtypes = set()
    devices = set()
    for tensor in tensors:
        here = _local(tensor)
        # A shard in a file of the rank is a tensor of one element, and knows its size.
        size += int(getattr(here, "ds_numel", 0)) or here.numel()
        if here.numel():
            dtypes.add(str(here.dtype).removeprefix("torch."))
            devices.add(here.device.type)
    return Share(
        local=size,
        whole=whole,
        dtypes=tuple(sorted(dtypes)),
        devices=tuple(sorted(devices)),
    )
