"""Make this rank's part of a checkpoint from the parts of another number of ranks.

DeepSpeed's universal checkpoint and torch's DCP do so for files of their own forms, which would have to be written
first; here the saved shards are read where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workbench.base.errors import RunError
from workbench.worker.checkpoint.snapshot import (
    SHARD,
    STAGE_3,
    is_shard,
    owned_weights,
    replicated,
    trained_weights,
)
from workbench.worker.rank import collectives as ranks

Flats = Sequence[torch.Tensor]
"""The flat buffers of a rank."""


def resharded(trainer: Any, states: Sequence[Any]) -> Any:
    """Return what `capture` would call this rank's engine, from those of all ranks that saved one."""
    if trainer.is_deepspeed_enabled:
        return _deepspeed_state(trainer.model_wrapped, states)
    if replicated(trainer):
        return None if ranks.rank() else states[0]
    return _fsdp_state(trainer, states)


def span(parts: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Return rows of the concatenation of parts, a view where one part has them; zeros beyond its end.

    Example:
        >>> span([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], 2, 6)
        tensor([3, 4, 5, 0])
    """
    taken, at = [], 0
    for part in parts:
        taken.append(part[max(0, start - at) : max(0, stop - at)])
        at += len(part)
    taken.append(parts[0].new_zeros(max(0, stop - max(start, at)), *parts[0].shape[1:]))
    filled = [piece for piece in taken if len(piece)]
    return filled[0] if len(filled) == 1 else torch.cat(filled or taken)


def _deepspeed_state(engine: Any, states: Sequence[Any]) -> dict[str, object]:
    zero, first = engine.optimizer, states[0]
    cut = _stage_3 if hasattr(zero, STAGE_3) else _stages_1_and_2
    kept = [state["optimizer"]["state"] for state in states]
    shape, like = first["weights"][0].shape, kept[0].get(0, {})
    flat = {key for key, value in like.items() if torch.is_tensor(value) and value.shape == shape}
    if any(
        torch.is_tensor(value) and value.dim() and key not in flat for key, value in like.items()
    ):
        raise RunError(
            "the states of this optimizer cannot be cut up anew; resume on as many ranks as saved them"
        )
    parts = {
        key: cut(zero, [[each[n][key] for n in sorted(each)] for each in kept]) for key in flat
    }
    weights = cut(zero, [state["weights"] for state in states])
    rest = {key: value for key, value in like.items() if key not in flat}
    # A buffer's own count of steps: one that two of them had in common would be counted up twice.
    of_buffer = {
        n: {**deepcopy(rest), **{key: parts[key][n] for key in flat}} for n in range(len(weights))
    }
    groups = zip(first["optimizer"]["param_groups"], _numbered(zero), strict=True)
    counters = first["counters"]
    return {
        **first,
        "weights": weights,
        "optimizer": {
            "state": of_buffer,
            "param_groups": [{**group, "params": own} for group, own in groups],
        },
        # The global batch stays, but not the micro-batches that it is made of.
        "counters": {
            **counters,
            "micro_steps": counters["global_steps"] * engine.gradient_accumulation_steps(),
        },
    }


def _numbered(zero: Any) -> list[list[int]]:
    # As torch numbers them: a flat buffer, of stage 3 several where a group is a large one, for each group.
    if not hasattr(zero, STAGE_3):
        return [[number] for number in range(len(zero.optimizer.param_groups))]
    groups: list[list[int]] = [[] for _ in zero.optimizer.param_groups]
    for number in range(len(zero.fp16_groups)):
        groups[zero.sub_group_to_group_id[number]].append(number)
    return groups


def _stages_1_and_2(zero: Any, parts: Sequence[Flats]) -> list[torch.Tensor]:
    """Cut each group's flat buffer anew: all its weights, zeros up to a multiple of the ranks, in equal parts."""
    cut = []
    for number, mine in enumerate(owned_weights(zero)):
        size, before = mine.numel(), [part[number] for part in parts]
        _check(
            abs(sum(map(len, before)) - size * ranks.world_size()),
            2 * (len(parts) + ranks.world_size()),
        )
        cut.append(span(before, ranks.rank() * size, (ranks.rank() + 1) * size).clone())
    return cut


def _stage_3(zero: Any, parts: Sequence[Flats]) -> list[torch.Tensor]:
    """Cut each weight anew: it lies in equal parts on all ranks, the last with zeros, one behind the other."""
    taken, at = [], 0
    for elements in (weight.ds_numel for group in zero.fp16_groups for weight in group):
        before, size = -(-elements // len(parts)), -(-elements // ranks.world_size())
        pieces = [span(part, at, at + before) for part in parts]
        mine = span(pieces, ranks.rank() * size, min(elements, (ranks.rank() + 1) * size))
        taken.append(span([mine], 0, size))
        at += before
    _check(abs(at - sum(map(len, parts[0]))), 1)
    own = torch.split(torch.cat(taken), [each.numel() for each in owned_weights(zero)])
    return [each.clone() for each in own]


def _check(difference: int, limit: int) -> None:
    if difference >= limit:
        raise RunError("the checkpoint is of another model; its weights do not fit this run")


def _fsdp_state(trainer: Any, states: Sequence[Any]) -> dict[str, object]:
    """Cut each weight's rows anew; under `hybrid` the parts of the first group come first, and make it whole."""

    def cut(weight: Any, pieces: Flats) -> torch.Tensor:
        shape, offset = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        return span(pieces, offset[0], offset[0] + shape[0]).clone()

    first = states[0]
    in_order = [
        weight for group in trainer.optimizer.optimizer.param_groups for weight in group["params"]
    ]

    def state_of(number: int, key: str, value: Any) -> object:
        if not is_shard(value):
            return value
        pieces = [state["optimizer"]["state"][number][key][1] for state in states]
        return (SHARD, cut(in_order[number], pieces))

    names = trained_weights(trainer).items()
    kept = first["optimizer"]["state"].items()
    return {
        **first,
        "weights": {
            name: cut(weight, [state["weights"][name] for state in states])
            for name, weight in names
        },
        "optimizer": {
            **first["optimizer"],
            "state": {
                number: {key: state_of(number, key, v) for key, v in each.items()}
                for number, each in kept
            },
        },
    }
