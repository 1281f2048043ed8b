"""Records of a rank for its agent: errors, completion and memory."""

from __future__ import annotations

import os
import platform
import socket
import traceback
from pathlib import Path

from workbench.agent import machine
from workbench.agent.ranks.records import DONE, done_record, only_lost_its_peer, write_record
from workbench.base.errors import RunError

_GIB = 1024**3


class EndedWithAnother(RunError):
    """This rank ended because another rank failed: an echo, never the cause."""


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write `error.json` atomically."""
    kind = type(error).__name__
    message = str(error) or kind
    is_echo = isinstance(error, EndedWithAnother) or only_lost_its_peer(message)
    lines = traceback.format_exception(error)
    record = {
        "rank": rank,
        "host": socket.gethostname(),
        "kind": kind,
        "message": message,
        "traceback": "".join(lines),
        "echo": is_echo,
    }
    write_record(folder / "error.json", record)


def write_done(folder: Path, rank: int) -> None:
    """Write `done.json`: the rank has finished all requested work."""
    write_record(folder / DONE, done_record(rank))


def memory() -> dict[str, float]:
    """Return this process's current and peak resident memory, and the fullest GPU's peaks."""
    import torch

    now, peak = machine.memory(os.getpid())
    sizes = {"rss_gib": now / _GIB, "peak_rss_gib": peak / _GIB}
    if torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())  # a model may use several
        allocated = [torch.cuda.max_memory_allocated(gpu) for gpu in gpus]
        reserved = [torch.cuda.max_memory_reserved(gpu) for gpu in gpus]
        sizes["cuda_allocated_gib"] = max(allocated) / _GIB
        sizes["cuda_reserved_gib"] = max(reserved) / _GIB
    return {name: round(value, 4) for name, value in sizes.items()}


def device() -> str:
    """Return the name of the rank's processor: torch's name of the GPU, or the CPU's model."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    path = Path("/proc/cpuinfo")
    lines: list[str] = []
    if path.exists():
        lines = path.read_text(errors="replace").splitlines()
    for line in lines:
        if line.startswith("model name"):
            _, _, model = line.partition(":")
            return model.strip() or platform.machine()
    return platform.machine()


def cores() -> str:
    """Return this process's allowed cores as ranges, `0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    texts = []
    for first, last in ranges:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)
