"""Measure an all-reduce between all ranks of some pods, with a process per rank.

The first process of a pod reads JSON lines on stdin, starts the others, and ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.agent.machine import address_for_others
from workbench.agent.site.nccl import left_open
from workbench.agent.site.setup import setup_variables
from workbench.base.process import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Pipes = Sequence[int]
"""File descriptors between the processes of a pod."""

_MIB = 1 << 20
_SIZES = (_MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB)
_LONG_S = 0.5
_LATENCIES = 100
_LOG_BYTES = 4 << 20
_PATIENCE = timedelta(seconds=40)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    of_setup = setup_variables(Path(sys.argv[1])) if sys.argv[1:] else {}
    pod = {name: value for name, value in {**os.environ, **of_setup}.items() if value}
    own = {**pod, **request["env"]}
    os.environ.update({**left_open(request["defaults"], own), **own})
    local, pipes = _start_others(int(request["slots"]))
    request["rank"] += local
    if local == 0:
        threading.Thread(target=_end_with_others, daemon=True).start()
    # A file in memory: nothing is left on the pod, and NCCL's lines stay out of stdout.
    log = os.memfd_create("nccl")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,GRAPH")
    os.environ["NCCL_DEBUG_FILE"] = f"/proc/self/fd/{log}"
    _measure(request, local, pipes, log)


def _start_others(slots: int) -> tuple[int, Pipes]:
    """Start the other processes of the pod. Return the own number, and pipes for the store.

    The first process has the writing ends, each other process its reading end.
    """
    parent = os.getpid()
    writing = []
    for local in range(1, slots):
        reading, end = os.pipe()
        if os.fork() == 0:
            die_with_parent(parent)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return local, [reading]
        os.close(reading)
        writing.append(end)
    return 0, writing


def _end_with_others() -> None:
    """End this process if another process of the pod has failed."""
    with suppress(ChildProcessError):
        while True:
            _, status = os.wait()
            if status:
                os._exit(1)


def _measure(request: Mapping[str, Any], local: int, pipes: Pipes, log: int) -> None:
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    backend = "nccl" if gpu else "gloo"
    store = _store(request, local, pipes)
    if local == 0:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    ranks = request["world_size"]
    dist.init_process_group(
        backend, store=store, rank=request["rank"], world_size=ranks, timeout=_PATIENCE
    )
    latency_s = _median_s(torch.zeros(1, device=device), 10, _LATENCIES)
    _say(request, {"backend": backend, "latency_s": latency_s})
    # The transports of this rank; the first rank names those of all.
    used = (
        nccl_transports(os.pread(log, _LOG_BYTES, 0).decode(errors="replace")) if gpu else [_gloo()]
    )
    store.set(f"transports-{request['rank']}", json.dumps(used))
    if request["rank"] == 0:
        all_used = [json.loads(store.get(f"transports-{rank}")) for rank in range(ranks)]
        names = sorted({name for each in all_used for name in each})
        _say(request, {"transports": names})
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
    _say(request, {"over": True})
    dist.destroy_process_group()


def nccl_transports(log: str) -> list[str]:
    """Return the transports in NCCL's log lines (NCCL_DEBUG=INFO) of a rank.

    Lines as in "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "via NET/IB/0/GDRDMA" and "NET/Socket :
    Using [0]eth0:10.0.0.1<0>". The lines of the graph name the links of a node: "type NVL/PIX".
    """
    ways = set(re.findall(r" via (P2P|SHM|NET)/([\w ]*)", log))
    found = set()
    for kind, way in ways:
        if kind == "P2P":
            has_nvlink = re.search(r" type NVL\b", log) is not None
            found.add("NVLink" if has_nvlink else "PCIe (P2P)")
        elif kind == "SHM":
            found.add("shared memory")
        elif way == "Socket":
            using = re.search(r"NET/Socket ?: Using (.*)", log)
            names = re.findall(r"\[\d+\]([\w.@-]+):", using[1]) if using else []
            found.add(f"sockets over {', '.join(names)}" if names else "sockets")
        elif way == "IB":
            found.add("InfiniBand or RoCE")
        elif re.search(r"Selected [Pp]rovider is efa", log):
            found.add("EFA")
        else:
            found.add(way.strip() or "network")
    return sorted(found)


def _gloo() -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return f"gloo over {interface}" if interface else "gloo"


def _median_s(buffer: object, warm_up: int, times: int) -> float:
    import torch
    import torch.distributed as dist

    took = []
    for number in range(warm_up + times):
        began = time.perf_counter()
        dist.all_reduce(buffer)
        if getattr(buffer, "is_cuda", False):
            torch.cuda.synchronize()
        if number >= warm_up:
            took.append(time.perf_counter() - began)
    return median(took)


def _store(request: Mapping[str, Any], local: int, pipes: Pipes) -> Store:
    """Open the store of all ranks. The first process of a pod passes the address on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    world = int(request["world_size"])
    listener = None
    opened: dict[str, Any]
    if request["rank"] == 0:
        address = address_for_others(str(request["address"]))
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen()
        opened = {"port": int(listener.getsockname()[1]), "address": address}
    elif local == 0:
        opened = json.loads(sys.stdin.readline())
    else:
        with os.fdopen(pipes[0]) as pipe:
            opened = json.loads(pipe.readline())
    # The first rank opens the port itself and hands it over, so no other process can take it.
    store = TCPStore(
        opened["address"],
        opened["port"],
        world,
        is_master=listener is not None,
        timeout=_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
    _say(request, opened)
    if local == 0:
        for pipe_end in pipes:
            with os.fdopen(pipe_end, "w") as pipe:
                pipe.write(json.dumps(opened) + "\n")
    return store


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
