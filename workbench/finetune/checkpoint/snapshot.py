"""State of a rank for an exact continuation of training, as a tree of tensors and numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import set_seed

from workbench.agent.rank import collectives as ranks
from workbench.finetune.checkpoint.tensor_tree import TreePacker, unpack


def capture(trainer: Any) -> dict[str, object]:
    """Return the state of the rank. The tensors are live: write the state before the next step."""
    return {
        "engine": trainer.technique.snapshot(trainer, rank=ranks.rank()),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": _random_state(cuda=trainer.args.device.type == "cuda"),
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "eval_losses": dict(trainer.eval_losses),
        "best": trainer.best.state(),
    }


def restore(trainer: Any, tree: Mapping[str, Any]) -> None:
    """Restore a return value of `capture` before the first step.

    Every rank must call this function.
    """
    trainer.technique.restore(trainer, tree["engine"], share=_from_the_first)
    trainer.lr_scheduler.load_state_dict(tree["scheduler"])
    trainer.eval_losses.update(tree["eval_losses"])


def restore_random(tree: Mapping[str, Any], *, seed: int) -> None:
    """Restore all random number generators; use a new seed if the number of ranks has changed."""
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


def _from_the_first(state: Any) -> Any:
    """Send rank 0's state to every rank."""
    if not ranks.connected():
        return state
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
