"""A real disk that is small: a file system in memory, which only root can mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(path: Path, size: str | int) -> Iterator[Path]:
    """Mount one of this size, as `mount` takes it; it is gone afterwards, with what is on it."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "small", str(path)], check=True
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
