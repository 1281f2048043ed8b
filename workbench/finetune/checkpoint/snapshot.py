"""State of a rank for an exact continuation of training, as a tree of tensors and numbers."""

from __future__ import annotations

import json
import random as python
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from workbench.agent.rank import collectives as ranks
from workbench.finetune.checkpoint.tensor_tree import TreePacker, unpack


def capture(trainer: Any, random: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the state of the rank. The tensors are live: write the state before the next step.

    `random` are random numbers of `random_state` to continue with. None: the present ones.
    """
    return {
        "engine": trainer.technique.snapshot(trainer, rank=ranks.rank()),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": random or random_state(trainer),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "eval_losses": dict(trainer.eval_losses),
        "best": trainer.best.state(),
    }


def restore(trainer: Any, tree: Mapping[str, Any]) -> None:
    """Restore a return value of `capture` before the first step.

    Every rank must call this function.
    """
    state = tree["engine"]
    if trainer.technique.one_part(trainer):
        state = _from_the_first(state)
    trainer.technique.restore(trainer, state)
    trainer.lr_scheduler.load_state_dict(tree["scheduler"])
    trainer.eval_losses.update(tree["eval_losses"])


def restore_random(tree: Mapping[str, Any], *, seed: int) -> None:
    """Restore all random number generators; use a new seed if the number of ranks has changed."""
    state = tree["random"]
    if state is None:
        own_seed = seed * 1_000_003 + tree["step"] * 8_191 + ranks.rank()
        set_seed(own_seed % 2**32)
        return
    python.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().view(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def random_state(trainer: Any) -> dict[str, object]:
    """Return the state of all random number generators of the rank."""
    name, keys, *rest = np.random.get_state()

    signed_keys = np.asarray(keys).view(np.int32).copy()
    state: dict[str, object] = {
        "python": python.getstate(),
        "numpy": (str(name), torch.from_numpy(signed_keys), *rest),
        "torch": torch.get_rng_state(),
    }
    if trainer.args.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _from_the_first(state: Any) -> Any:
    """Send rank 0's state to every rank."""
    if not ranks.connected():
        return state
    packer = TreePacker()
    own_text: bytes | None = None
    own_shapes: bytes | None = None
    if ranks.rank() == 0:
        own_text = json.dumps(packer.pack(state)).encode()
        shapes = {}
        for name, tensor in packer.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            shapes[name] = [dtype, list(tensor.shape)]
        own_shapes = json.dumps(shapes).encode()
    packed = json.loads(ranks.broadcast_bytes(own_text))
    sent_shapes = json.loads(ranks.broadcast_bytes(own_shapes))
    # The tensors follow, one message each, in the order of the shapes.
    tensors = {}
    for name, (dtype, shape) in sent_shapes.items():
        mine = packer.tensors.get(name)
        own_bytes = None
        if mine is not None:
            own_bytes = bytes(mine.reshape(-1).view(torch.uint8).numpy())
        data = ranks.broadcast_bytes(own_bytes)
        # torch makes no tensor of an empty buffer.
        flat = torch.empty(0, dtype=torch.uint8)
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tensors[name] = flat.view(getattr(torch, dtype)).reshape(shape)
    return unpack(packed, tensors)
