"""Sum tensors over the ranks, as a user's script does, and hold a GPU's memory."""

from __future__ import annotations

from typing import Any

_ELEMENTS = 16 << 20  # 64 MiB in FP32
_ROUNDS = 5


def joined() -> tuple[Any, str]:
    """Join the process group of the ranks. Return the device of this rank and the backend."""
    import os

    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device, "nccl"
    dist.init_process_group("gloo")
    return torch.device("cpu"), "gloo"


def all_reduced() -> dict[str, object]:
    """Sum 64 MiB over all ranks some times. Return the backend, the errors and the seconds."""
    import os
    import time

    import torch
    import torch.distributed as dist

    device, backend = joined()
    ranks = dist.get_world_size()
    expected = ranks * (ranks + 1) / 2
    numbers = torch.empty(_ELEMENTS, device=device)
    wrong = 0
    best_s = float("inf")
    for _ in range(_ROUNDS):
        numbers.fill_(dist.get_rank() + 1)
        began_s = time.perf_counter()
        dist.all_reduce(numbers)
        # On a GPU the call returns before the sum is done.
        wrong += int((numbers != expected).sum())
        best_s = min(best_s, time.perf_counter() - began_s)
    dist.destroy_process_group()
    return {
        "backend": backend,
        "wrong": wrong,
        "seconds": best_s,
        "bytes": 4 * _ELEMENTS,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    }


def held_memory(gib: float, seconds: float) -> str:
    """Hold some memory of the rank's device for some seconds. Return the device."""
    import os
    import time

    import torch

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    kept = torch.ones(int(gib * 2**30 / 4), device=device)
    time.sleep(seconds)
    return f"{kept.device.type} {float(kept[-1])}"
