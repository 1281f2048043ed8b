"""What a rank leaves behind for its agent: the error record, the done-record, and its memory.

A run has succeeded when every rank wrote its done-record; the error record is written at the moment of the
exception, so that the earliest one names the cause.
"""

from __future__ import annotations

import json
import platform
import socket
import time
import traceback
from pathlib import Path

from workbench.worker.agent.ranks.lost_peer import only_lost_its_peer

__all__ = ["device", "memory", "write_done", "write_error"]

_GIB = 1024**3


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write `error.json`, replacing it in one step."""
    message = str(error) or type(error).__name__
    _write(
        folder / "error.json",
        {
            "rank": rank,
            "host": socket.gethostname(),
            "kind": type(error).__name__,
            "message": message,
            "traceback": "".join(traceback.format_exception(error)),
            "time_s": time.time(),
            "echo": only_lost_its_peer(message),
        },
    )


def write_done(folder: Path, rank: int) -> None:
    """Write `done.json`: this rank has finished everything that was asked."""
    _write(folder / "done.json", {"rank": rank, "time_s": time.time()})


def memory() -> dict[str, float]:
    """Measure this process's memory: resident now and at its peak, and the GPU's peaks where it uses one."""
    import torch

    status = _status()
    sizes = {
        "rss_gib": status.get("VmRSS", 0) * 1024 / _GIB,
        "peak_rss_gib": status.get("VmHWM", 0) * 1024 / _GIB,
    }
    if torch.cuda.is_available():
        sizes["cuda_allocated_gib"] = torch.cuda.max_memory_allocated() / _GIB
        sizes["cuda_reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
    return {name: round(value, 4) for name, value in sizes.items()}


def device() -> str:
    """Name the processor that this rank trains on: torch's name of the GPU, or the CPU's model."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _status() -> dict[str, int]:
    # Linux only; elsewhere the figures are 0 rather than wrong.
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) for name, value in pairs if value.strip().endswith(" kB")}


def _write(path: Path, record: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(path)
