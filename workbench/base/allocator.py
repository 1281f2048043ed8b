"""What a process that trains on a CPU takes its memory from: jemalloc, where the machine has it.

The C library keeps what is freed in pieces below 32 MiB, up to half as much again as the tensors that are alive;
jemalloc gives it back, and is no slower.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_PRELOAD = "LD_PRELOAD"
_LIBRARY = "libjemalloc.so.2"
_GPU = "/dev/nvidiactl"  # with one, tensors lie elsewhere


def preloaded() -> dict[str, str]:
    """Return the variable that gives a program this allocator from its start on; none where it is not to be had."""
    shared = sysconfig.get_config_var("MULTIARCH") or ""
    folders = (
        f"{sys.prefix}/lib",
        "/usr/local/lib",
        f"/usr/lib/{shared}",
        "/usr/lib64",
        "/usr/lib",
    )
    found = [path for folder in folders if (path := Path(folder, _LIBRARY)).exists()]
    return {_PRELOAD: str(found[0])} if found and not Path(_GPU).exists() else {}


def keep_from_children() -> None:
    """Take the variable out of such a program's environment: what it starts has an allocator of its own."""
    if os.environ.get(_PRELOAD) in preloaded().values():
        del os.environ[_PRELOAD]
