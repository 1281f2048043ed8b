"""The memory allocator of processes that train on a CPU: jemalloc if installed.

The C library keeps freed pieces below 32 MiB, up to half of the live tensors' size on top. jemalloc
returns the memory, and is no slower.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

_PRELOAD = "LD_PRELOAD"
_LIBRARY = "libjemalloc.so.2"
_GPU = "/dev/nvidiactl"  # with a GPU, tensors are not in host memory


def preloaded() -> dict[str, str]:
    """Return the variable that preloads the allocator into a program; {} without jemalloc."""
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
    """Remove the variable from the environment, so child processes use their own allocator."""
    if os.environ.get(_PRELOAD) in preloaded().values():
        del os.environ[_PRELOAD]
