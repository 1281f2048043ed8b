"""What a rank must keep to go on training later exactly as if it had not stopped, as a tree of tensors and numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import set_seed

from workbench.base.errors import RunError
from workbench.worker.checkpoint.tensor_tree import TreePacker, unpack
from workbench.worker.rank import collectives as ranks

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
STAGE_3 = "fp32_partitioned_groups_flat"  # what only DeepSpeed's optimizer of stage 3 has
SHARD = "shard"


def capture(trainer: Any) -> dict[str, object]:
    """Return what this rank must keep. Its tensors are the living ones: write them before the next step."""
    return {
        "engine": _engine_state(trainer),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": _random_state(cuda=trainer.args.device.type == "cuda"),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "eval_losses": dict(trainer.eval_losses),
        "best": trainer.best.state(),
    }


def restore(trainer: Any, tree: Mapping[str, Any]) -> None:
    """Put back what `capture` gave, into a trainer that is ready for its first step; every rank must call it."""
    if trainer.is_deepspeed_enabled:
        _restore_deepspeed(trainer.model_wrapped, tree["engine"])
    else:
        _restore_plain(trainer, tree["engine"])
    trainer.lr_scheduler.load_state_dict(tree["scheduler"])
    trainer.eval_losses.update(tree["eval_losses"])


def restore_random(tree: Mapping[str, Any], *, seed: int) -> None:
    """Put back the state of every source of random numbers; of a checkpoint of another number of ranks, a new one."""
    state = tree["random"]
    if state is None:
        set_seed((seed * 1_000_003 + tree["step"] * 8_191 + ranks.rank()) % 2**32)
        return
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state(*, cuda: bool) -> dict[str, object]:
    name, keys, *rest = np.random.get_state()
    state: dict[str, object] = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).view(np.int32).copy()), *rest),
        "torch": torch.get_rng_state(),
    }
    if cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _engine_state(trainer: Any) -> dict[str, object] | None:
    if trainer.is_deepspeed_enabled:
        return _deepspeed_state(trainer.model_wrapped)
    if replicated(trainer) and ranks.rank():
        return None
    optimizer = trainer.optimizer.optimizer
    state = optimizer.state_dict()
    scaler = getattr(trainer.accelerator, "scaler", None)
    return {
        "weights": {name: _local(p) for name, p in trained_weights(trainer).items()},
        "optimizer": {
            "state": {
                n: {k: _marked(v) for k, v in each.items()} for n, each in state["state"].items()
            },
            "param_groups": state["param_groups"],
        },
        "scaler": scaler.state_dict() if scaler is not None else None,
        **({"averaging": trainer.averaging.state()} if trainer.averaging is not None else {}),
    }


def _restore_plain(trainer: Any, state: Mapping[str, Any] | None) -> None:
    if replicated(trainer):
        state = _from_the_first(state)
    assert state is not None
    trained = trained_weights(trainer)
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
    if trainer.averaging is not None:
        trainer.averaging.restore(state["averaging"])


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the weights that are trained, by name."""
    # What is not trained (the model beneath adapters) comes from where it came from the first time.
    return {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}


def replicated(trainer: Any) -> bool:
    """Whether every rank holds the same, without DeepSpeed: the first one's is kept."""
    apart = trainer.averaging is not None
    return (
        ranks.connected()
        and not apart
        and not any(isinstance(p, DTensor) for p in trainer.model.parameters())
    )


def _from_the_first(state: Mapping[str, Any] | None) -> Any:
    packer = TreePacker()
    text = json.dumps(packer.pack(state)).encode() if ranks.rank() == 0 else None
    shapes = json.dumps(
        {n: [str(t.dtype)[6:], list(t.shape)] for n, t in packer.tensors.items()}
    ).encode()
    packed = json.loads(ranks.broadcast_bytes(text))
    tensors = {}
    for name, (dtype, shape) in json.loads(ranks.broadcast_bytes(shapes if text else None)).items():
        mine = packer.tensors.get(name)
        data = ranks.broadcast_bytes(
            bytes(mine.reshape(-1).view(torch.uint8).numpy()) if mine is not None else None
        )
        flat = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return unpack(packed, tensors)


def _deepspeed_state(engine: Any) -> dict[str, object]:
    zero = engine.optimizer
    scaler = getattr(zero, "loss_scaler", None)
    return {
        "weights": [each.data for each in owned_weights(zero)],
        "optimizer": _base_optimizer_state(zero),
        "scaler": {
            name: value for name, value in vars(scaler).items() if isinstance(value, int | float)
        }
        if scaler is not None
        else None,
        "counters": {name: int(getattr(engine, name)) for name in _COUNTERS},
    }


def _restore_deepspeed(engine: Any, state: Mapping[str, Any]) -> None:
    zero = engine.optimizer
    owned = owned_weights(zero)
    if [each.shape for each in owned] != [each.shape for each in state["weights"]]:
        raise RunError("the checkpoint is of another model; its weights do not fit this run")
    if state["scaler"] is not None:
        vars(zero.loss_scaler).update(state["scaler"])
    if getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False):
        _restore_on_disk(zero, state)
    elif hasattr(zero, STAGE_3):
        # DeepSpeed's own way, with what its checkpoint files would hold.
        scaling = {
            "loss_scaler": zero.loss_scaler,
            "dynamic_loss_scale": zero.dynamic_loss_scale,
            "overflow": False,
        }
        zero.checkpoint_event_prologue()
        kept = {"optimizer_state_dict": state["optimizer"], "fp32_flat_groups": state["weights"]}
        zero.load_state_dict({ranks.rank(): {**scaling, **kept}})
        zero.checkpoint_event_epilogue()
    else:
        zero.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for mine, saved in zip(owned, state["weights"], strict=True):
                mine.data.copy_(saved)
        zero.update_lp_params()
    for name, value in state["counters"].items():
        setattr(engine, name, value)


def owned_weights(zero: Any) -> list[torch.Tensor]:
    """Return the flat FP32 weights that this rank updates."""
    for name in (STAGE_3, "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(zero, name):
            files = on_disk(zero)
            return [files.get(id(each), each) for each in getattr(zero, name)]
    raise RunError(
        f"checkpoints of DeepSpeed's {type(zero).__name__} are not known here; leave `save_steps` out"
    )


def on_disk(zero: Any) -> dict[int, torch.Tensor]:
    """Return the files of an offload to NVMe as tensors, by the ids of the tensors that stand empty between steps."""
    swapper = getattr(zero, "optimizer_swapper", None)
    return {
        id(each.compute_tensor): torch.from_file(
            each.swap_path, shared=True, size=info.numel(), dtype=info.dtype()
        )
        for info in (swapper.swap_params_info.values() if swapper else ())
        for each in info.tensors
    }


def _restore_on_disk(zero: Any, state: Mapping[str, Any]) -> None:
    # DeepSpeed's own way copies into tensors that stand empty. As after a step, so that the files are written.
    saved, timers = state["optimizer"], set[str]()
    for group, options in zip(zero.optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    for number, weights in enumerate(getattr(zero, STAGE_3)):
        zero._prepare_sub_group(number, timers)
        weights.data.copy_(state["weights"][number])
        zero.optimizer.state[weights] = saved["state"][number]
        zero._reassign_or_swap_out_partitioned_parameters(number)
        zero._release_sub_group(number, timers)


def _base_optimizer_state(zero: Any) -> dict[str, Any]:
    if not hasattr(zero, STAGE_3):
        return dict(zero.optimizer.state_dict())
    zero._set_fp32_optimizer_param_groups()  # between steps stage 3 leaves its optimizer without parameters
    try:
        state, files = dict(zero.optimizer.state_dict()), on_disk(zero)
    finally:
        zero._clear_fp32_optimizer_param_groups()
    state["state"] = {
        number: {key: files.get(id(value), value) for key, value in each.items()}
        for number, each in state["state"].items()
    }
    return state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _marked(value: object) -> object:
    return (SHARD, _local(value)) if isinstance(value, DTensor) else value


def is_shard(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (SHARD,)


def _unmarked(value: Any, parameter: Any) -> object:
    if not is_shard(value):
        return value
    place = parameter.device_mesh, parameter.placements
    shard = value[1].to(_local(parameter).device)
    return DTensor.from_local(
        shard, *place, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
