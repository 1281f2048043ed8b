"""Exchange bytes and sums between the ranks of a run, and wait at barriers.

Bytes are never pickled and never pass through the TCP store: anyone on the pods' network can read
and write the store.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from workbench.base.errors import RunError


def connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    if not connected():
        return 0
    return dist.get_rank()


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    if not connected():
        return 1
    return dist.get_world_size()


def backend() -> str:
    """Return the library of the collectives, "gloo" or "nccl"; "" without a process group."""
    if not connected():
        return ""
    return str(dist.get_backend())


def barrier() -> None:
    if connected():
        # A sum rather than dist.barrier(): NCCL's barrier guesses the device and warns.
        dist.all_reduce(torch.zeros(1, device=_device()))


def sums(values: Sequence[float]) -> list[float]:
    """Return the sums over all ranks in double precision. Every rank must call this."""
    total = torch.tensor(list(values), dtype=torch.float64, device=_device())
    if connected():
        dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def add_up(values: torch.Tensor) -> None:
    """Sum a tensor over all ranks in place, unread. Every rank must call the function."""
    if connected():
        dist.all_reduce(values)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Send rank 0's bytes to every rank; the others pass None."""
    own = data or b""
    if not connected():
        return own
    size = torch.tensor([len(own)], dtype=torch.int64, device=_device())
    dist.broadcast(size, src=0)
    if rank() == 0:
        content = _tensor(own)
    else:
        count = int(size.item())
        content = torch.empty(count, dtype=torch.uint8, device=_device())
    dist.broadcast(content, src=0)
    return _bytes(content)


def gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's bytes to every rank, in the order of ranks."""
    if not connected():
        return [data]
    count = world_size()
    # Tensors of a collective must have the same size: gather the sizes first, then padded bytes.
    size = torch.tensor([len(data)], dtype=torch.int64, device=_device())
    sizes = [torch.zeros_like(size) for _ in range(count)]
    dist.all_gather(sizes, size)
    lengths = [int(each.item()) for each in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=_device())
    padded[: len(data)] = _tensor(data)
    everyone = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(everyone, padded)
    pieces = []
    for content, length in zip(everyone, lengths, strict=True):
        pieces.append(_bytes(content[:length]))
    return pieces


class FailedAlike(RunError):
    """A rank failed and every rank raises this error, so no rank waits for another."""


@contextmanager
def alike(*, collective: bool) -> Iterator[None]:
    """Raise `FailedAlike` on all ranks if a rank fails inside.

    With `collective` the failing rank raises its own error: other ranks may wait in a collective.
    """
    failure = ""
    try:
        yield
    except Exception as error:
        if collective:
            raise
        traceback.print_exc(file=sys.stderr)
        failure = f"rank {rank()}: {type(error).__name__}: {error}"
    if collective:
        return
    for text in gather_bytes(failure.encode()):
        if text:
            raise FailedAlike(text.decode())


def close() -> None:
    if connected():
        dist.destroy_process_group()


def _device() -> torch.device:
    # NCCL needs tensors on the GPU, gloo tensors in main memory.
    if connected() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=_device())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device())


def _bytes(content: torch.Tensor) -> bytes:
    return bytes(content.cpu().numpy().tobytes())
