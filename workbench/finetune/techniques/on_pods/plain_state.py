"""State of a rank without DeepSpeed: trained weights, torch's optimizer, and the loss scaler.

A sharded weight (`DTensor`) is saved as the rank's shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workbench.base.errors import RunError
from workbench.finetune.techniques.on_pods.cutting import Flats, span

_SHARD = "shard"


def capture(trainer: Any) -> dict[str, object]:
    """Return the state of the rank. The tensors are live, not copies."""
    state = trainer.optimizer.optimizer.state_dict()
    scaler = getattr(trainer.accelerator, "scaler", None)
    return {
        "weights": {name: _local(p) for name, p in _trained_weights(trainer).items()},
        "optimizer": {
            "state": {
                n: {k: _marked(v) for k, v in each.items()} for n, each in state["state"].items()
            },
            "param_groups": state["param_groups"],
        },
        "scaler": scaler.state_dict() if scaler is not None else None,
    }


def put_back(trainer: Any, state: Mapping[str, Any]) -> None:
    """Restore a return value of `capture` into a trainer before its first step."""
    trained = _trained_weights(trainer)
    saved = state["weights"]
    for name in trained.keys() | saved.keys():
        if (
            name not in trained
            or name not in saved
            or _local(trained[name]).shape != saved[name].shape
        ):
            raise RunError(
                f"the checkpoint is of another model: {name} does not fit; resume with the model of its run"
            )
    with torch.no_grad():
        for name, parameter in trained.items():
            _local(parameter).copy_(saved[name])
    optimizer = trainer.optimizer.optimizer
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    states = {
        number: {key: _unmarked(value, in_order[number]) for key, value in each.items()}
        for number, each in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({"state": states, "param_groups": state["optimizer"]["param_groups"]})
    if state["scaler"] is not None:
        trainer.accelerator.scaler.load_state_dict(state["scaler"])


def cut_anew(trainer: Any, states: Sequence[Any]) -> dict[str, object]:
    """Cut each weight's rows anew.

    Under `hybrid` the first group's parts already make up a weight.
    """

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
        if not _is_shard(value):
            return value
        pieces = [state["optimizer"]["state"][number][key][1] for state in states]
        return (_SHARD, cut(in_order[number], pieces))

    names = _trained_weights(trainer).items()
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


def _trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights by name."""
    # Frozen weights (the model beneath adapters) are loaded from their original source.
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _marked(value: object) -> object:
    return (_SHARD, _local(value)) if isinstance(value, DTensor) else value


def _is_shard(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_SHARD,)


def _unmarked(value: Any, parameter: Any) -> object:
    if not _is_shard(value):
        return value
    place = parameter.device_mesh, parameter.placements
    shard = value[1].to(_local(parameter).device)
    return DTensor.from_local(
        shard, *place, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
