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
    weights = {name: _local(weight) for name, weight in _trained_weights(trainer).items()}
    optimizer = trainer.optimizer.optimizer.state_dict()
    states = {}
    for number, values in optimizer["state"].items():
        states[number] = {key: _marked(value) for key, value in values.items()}
    scaler = getattr(trainer.accelerator, "scaler", None)
    return {
        "weights": weights,
        "optimizer": {"state": states, "param_groups": optimizer["param_groups"]},
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def put_back(trainer: Any, state: Mapping[str, Any]) -> None:
    """Restore a return value of `capture` into a trainer before its first step."""
    trained = _trained_weights(trainer)
    saved = state["weights"]
    for name in trained.keys() | saved.keys():
        in_both = name in trained and name in saved
        if not in_both or _local(trained[name]).shape != saved[name].shape:
            raise RunError(
                f"the checkpoint is of another model: {name} "
                "does not fit; resume with the model of its run"
            )
    with torch.no_grad():
        for name, parameter in trained.items():
            _local(parameter).copy_(saved[name])
    optimizer = trainer.optimizer.optimizer
    in_order = _in_order(optimizer)
    saved_optimizer = state["optimizer"]
    states = {}
    for number, values in saved_optimizer["state"].items():
        weight = in_order[number]
        states[number] = {key: _unmarked(value, weight) for key, value in values.items()}
    optimizer.load_state_dict({"state": states, "param_groups": saved_optimizer["param_groups"]})
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
    in_order = _in_order(trainer.optimizer.optimizer)

    def state_of(number: int, key: str, value: Any) -> object:
        if not _is_shard(value):
            return value
        pieces = [state["optimizer"]["state"][number][key][1] for state in states]
        return (_SHARD, cut(in_order[number], pieces))

    weights = {}
    for name, weight in _trained_weights(trainer).items():
        pieces = [state["weights"][name] for state in states]
        weights[name] = cut(weight, pieces)

    kept = {}
    for number, values in first["optimizer"]["state"].items():
        kept[number] = {key: state_of(number, key, value) for key, value in values.items()}
    return {
        **first,
        "weights": weights,
        "optimizer": {**first["optimizer"], "state": kept},
    }


def _trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights by name."""
    # Frozen weights (the model beneath adapters) are loaded from their original source.
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def _in_order(optimizer: Any) -> list[Any]:
    """Return the optimizer's weights by their numbers in its states."""
    weights = []
    for group in optimizer.param_groups:
        weights.extend(group["params"])
    return weights


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()


def _marked(value: object) -> object:
    return (_SHARD, _local(value)) if isinstance(value, DTensor) else value


def _is_shard(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_SHARD,)


def _unmarked(value: Any, parameter: Any) -> object:
    if not _is_shard(value):
        return value
    shard = value[1].to(_local(parameter).device)
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
