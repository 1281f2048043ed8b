"""Measure an all-reduce between pods, with a process per pod.

The process reads JSON lines on stdin and ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from workbench.agent.machine import address_for_others
from workbench.agent.site.nccl import left_open
from workbench.agent.site.setup import setup_variables

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

_MIB = 1 << 20
_SIZES = (_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
_LONG_S = 0.5
_STEP_S = 0.04
_TURNS = 5
_ROUNDS = 2
_LATENCIES = 100
_PATIENCE = timedelta(seconds=40)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    of_setup = setup_variables(Path(sys.argv[1])) if sys.argv[1:] else {}
    own = {**os.environ, **of_setup, **request["env"]}
    os.environ.update({**left_open(request["defaults"], own), **own})
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    backend = "nccl" if gpu else "gloo"
    store = _store(request)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    dist.init_process_group(
        backend,
        store=store,
        rank=request["rank"],
        world_size=request["world_size"],
        timeout=_PATIENCE,
    )
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    latency_s = _median_s(torch.zeros(1, device=device), 10, _LATENCIES)
    _say(request, {"backend": backend, "latency_s": latency_s})
    for size in _SIZES:
        buffer = torch.zeros(size // 4, device=device)
        first_s = torch.tensor([_median_s(buffer, 0, 1)], device=device)
        dist.all_reduce(first_s, op=dist.ReduceOp.MAX)  # all ranks must repeat equally often
        longest_s = float(first_s)
        took_s = longest_s
        if longest_s <= _LONG_S:
            times = int(0.3 / longest_s)
            took_s = _median_s(buffer, 1, max(2, min(20, times)))
        _say(request, {"bytes": size, "took_s": took_s})
        if longest_s > _LONG_S:
            break
    _say(request, {"slowdown": _slowdown(device, request["world_size"], _chunks(device))})
    _say(request, {"over": True})
    dist.destroy_process_group()


def _median_s(buffer: object, warm_up: int, times: int) -> float:
    import torch.distributed as dist

    took = []
    for number in range(warm_up + times):
        began = time.perf_counter()
        dist.all_reduce(buffer)
        if getattr(buffer, "is_cuda", False):
            _wait_for_gpu()
        if number >= warm_up:
            took.append(time.perf_counter() - began)
    return median(took)


def _chunks(device: torch.device) -> int:
    """Return the number of small computations that take rank 0 as long as a small model's step."""
    import torch
    import torch.distributed as dist

    rounds = torch.zeros(1, device=device)
    if dist.get_rank() == 0:
        began = time.perf_counter()
        while time.perf_counter() - began < 4 * _STEP_S:
            _compute(device)
            rounds += 1
    dist.all_reduce(rounds)
    return max(1, round(float(rounds) / 4))


def _slowdown(device: torch.device, ranks: int, chunks: int) -> float:
    """Return how many times longer all ranks compute than rank 0 alone, at least 1.

    Rank 0 alone and all ranks take turns, because the pods' other load changes with time.
    """
    ratios = []
    for _ in range(_TURNS):
        alone_s = _computed_s(device, 1, chunks)
        ratios.append(_computed_s(device, ranks, chunks) / alone_s)
    return max(1.0, median(ratios))


def _computed_s(device: torch.device, among: int, chunks: int) -> float:
    """Return the mean seconds of computing.

    The first `among` ranks run `chunks` small computations per round and then meet all other ranks.
    """
    import torch
    import torch.distributed as dist

    one = torch.zeros(1, device=device)
    took_s = torch.zeros(1, device=device)
    dist.all_reduce(one)
    for _ in range(_ROUNDS):
        if dist.get_rank() < among:
            began = time.perf_counter()
            for _ in range(chunks):
                _compute(device)
            took_s += time.perf_counter() - began
        dist.all_reduce(one)
        float(one)  # on a GPU the call returns before the end
    dist.all_reduce(took_s)
    return float(took_s) / _ROUNDS / among


def _compute(device: torch.device) -> None:
    import torch

    matrix = torch.ones(256, 256, device=device)
    for _ in range(10):
        matrix = torch.softmax(matrix @ matrix, -1)
    if device.type == "cuda":
        _wait_for_gpu()


def _wait_for_gpu() -> None:
    import torch

    torch.cuda.synchronize()


def _store(request: Mapping[str, object]) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = address_for_others(str(request["address"]))
    world = int(str(request["world_size"]))
    if request["rank"] == 0:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        store = TCPStore(
            address,
            port,
            world,
            is_master=True,
            timeout=_PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        _say(request, {"port": port, "address": address})
        return store
    opened = json.loads(sys.stdin.readline())
    return TCPStore(
        opened["address"],
        opened["port"],
        world,
        is_master=False,
        timeout=_PATIENCE,
        wait_for_workers=False,
    )


def _end_with_stdin() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


def _say(request: Mapping[str, object], what: Mapping[str, object]) -> None:
    if request["rank"] == 0:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
