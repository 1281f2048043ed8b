"""Write a rank's last collectives from torch's flight recorder when its stacks are requested."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d

from workbench.agent.ranks.stacks import STACKS
from workbench.base.files import write_bytes
from workbench.rundir.paths import FLIGHT

_LOOK_S = 0.25


def record(folder: Path) -> None:
    """Start the recording in a thread: the main thread may be waiting in a collective."""
    threading.Thread(target=_watch, args=(folder,), name="flight", daemon=True).start()


def _watch(folder: Path) -> None:
    seen = 0
    while True:
        time.sleep(_LOOK_S)
        with suppress(OSError, RuntimeError):
            size = (folder / STACKS).stat().st_size
            if size > seen:
                dump = recorded()
                if dump:
                    write_bytes(folder / FLIGHT, dump)
            seen = size


def recorded() -> bytes:
    """Return the flight record as JSON, or b"" if this torch or backend has no recorder."""
    if not (dist.is_available() and dist.is_initialized()):
        return b""
    library = "nccl" if "nccl" in str(dist.get_backend()) else "fr"
    dump = getattr(_distributed_c10d, f"_dump_{library}_trace_json", None)
    if dump is None:
        return b""
    return bytes(dump())
