"""The one message about a disk that is full, whoever meets it: whose it is, which folder, what is needed and free."""

from __future__ import annotations

import errno
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
    """Make the error; `needed` is None where nobody knows, `kept` are bytes that must stay free.

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
    """Whether an error says that a disk, or what this user may take of it, is full."""
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
    """Turn what the system says of a full disk into the one message."""
    try:
        yield
    except DiskFull:
        raise
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(folder, needed, free_bytes(folder), where=where) from error
