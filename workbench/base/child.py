"""Start this Python again as a child, which finds this very package: the folder, or the zip, it was imported from."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workbench.base.json_values import parse_json

HOME = str(Path(__file__).absolute().parents[2])
QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every rank: no warnings of forks, no reports to the hub, no output held back."""

HELPER = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Variables of a child that only looks at something for this process: one thread, no GPU, nothing but its answers."""


def child_environment(**more: str) -> Mapping[str, str]:
    """Return this process's environment with this package first on the import path, and `more` in it."""
    rest = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{HOME}{os.pathsep}{rest}" if rest else HOME, **more}


def start(
    *words: str, cwd: str | Path = "/", env: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start this Python in a session of its own, out of the notebook's signals, and in `/`, past a user's torch.py."""
    env = child_environment() if env is None else env
    return subprocess.Popen(
        [sys.executable, "-P", *words], cwd=cwd, env=env, start_new_session=True, **streams
    )


def main_of(module: str) -> tuple[str, str]:
    """Return the words that run the `main` of a module that imports torch or transformers.

    No collections while they load: they take 3.1 s of CPU then rather than 4.0. Nor are their modules taken down one by
    one at the end.
    """
    load = f"import gc, os, sys; gc.disable(); from {module} import main; gc.freeze(); gc.enable()"
    return (
        "-c",
        f"{load}; code = main() or 0; sys.stdout.flush(); sys.stderr.flush(); os._exit(code)",
    )


def replies(
    module: str, *, request: object, limit_s: float | None = None, memory_bytes: int | None = None
) -> Iterator[Any]:
    """Yield the lines of JSON that a module answers a request with, and end it; ValueError says how it failed.

    Args:
        module: The module whose `main` is run.
        request: What it reads on its standard input.
        limit_s: Seconds after which it is ended. Default None: none.
        memory_bytes: Bytes of private memory that it may have. Default None: as many as this process.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(request).encode())
        given.seek(0)
        env, pipe = child_environment(**HELPER), subprocess.PIPE
        child = start(
            "-W", "ignore", *main_of(module), env=env, stdin=given, stdout=pipe, stderr=errors
        )
        assert child.stdout is not None
        if memory_bytes is not None and hasattr(resource, "prlimit"):
            # Not its address space: a driver of GPUs reserves far more of that than it uses.
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(child.pid, resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        end, began = threading.Timer(limit_s or 0.0, child.kill), time.monotonic()
        end.daemon = True
        try:
            if limit_s is not None:
                end.start()
            for line in child.stdout:
                yield parse_json(line)
            if child.wait():
                if limit_s is not None and time.monotonic() - began >= limit_s:
                    raise ValueError(f"it took more than {limit_s:.0f} s and was given up")
                errors.seek(0)
                tail = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise ValueError((tail or [f"exit code {child.returncode}"])[0])
        finally:
            end.cancel()
            child.kill()
            child.stdout.close()
            child.wait()
