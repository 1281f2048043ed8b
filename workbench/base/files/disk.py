"""The message about a full disk, in all cases: its machine, folder, needed and free bytes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from workbench.base.errors import DiskFull

HERE = "this machine"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_full(
    folder: PurePath | str, needed: int | None, free: int, *, where: str = HERE, kept: int = 0
) -> DiskFull:
    """Make the error; `needed` is None if unknown, `kept` is the number of bytes to keep free.

    Example:
        >>> print(disk_full("/runs/a", 8_388_608, 98_304, where="pod-1"))
        the disk of pod-1 is full: /runs/a needs 8,388,608 bytes and has 98,304 free
    """
    need = "more room" if needed is None else f"{needed:,} bytes"
    beside = f" beside {kept:,} that are kept for logs and results" if kept else ""
    return DiskFull(
        errno.ENOSPC,
        f"the disk of {where} is full: {folder} needs {need}{beside} and has {free:,} free",
    )


def is_full(error: OSError) -> bool:
    """Return whether an error reports a full disk or an exhausted quota."""
    return error.errno in _FULL


def free_bytes(folder: Path) -> int:
    """Return the free bytes where a folder is, or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(folder: Path, needed: int, *, where: str = HERE) -> None:
    if (free := free_bytes(folder)) < needed:
        raise disk_full(folder, needed, free, where=where)


@contextmanager
def full_disk_named(
    folder: Path, needed: int | None = None, *, where: str = HERE
) -> Iterator[None]:
    """Convert the system's error about a full disk into our message."""
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        if not is_full(error):
            raise
        # The folder may be the descriptor of a folder.
        named = os.path.realpath(folder)
        raise disk_full(named, needed, free_bytes(folder), where=where) from error
