"""What a rank must keep to go on training later exactly as if it had not stopped, as a tree of tensors and numbers."""

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
    """Return what this rank must keep. Its tensors are the living ones: write them before the next step."""
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
    """Put back what `capture` gave, into a trainer that is ready for its first step; every rank must call it."""
    trainer.technique.restore(trainer, tree["engine"], share=_from_the_first)
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


def _from_the_first(state: Any) -> Any:
    """Give every rank what rank 0 has."""
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
