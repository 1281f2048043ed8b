"""The lock that a keeper holds on its cluster: as long as it lives, there is no other keeper."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from workbench.base.errors import RunError

TAKEN = 75
"""Exit code of a keeper that found another one."""


def take_lock(path: Path, inode: int | None = None) -> int | None:
    """Lock a cluster until this process ends; return the lock's inode, None where it is taken or is not `inode`."""
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if inode is None else 0)
    while True:
        try:
            handle = os.open(path, flags, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            raise RunError(f"{path} cannot be locked ({error.strerror}), so another keeper may be there") from error
        locked = os.fstat(handle).st_ino
        if inode not in (None, locked):
            os.close(handle)
            raise RunError(f"{path} is not the lock of the keeper before: the directory is a copy, or was changed")
        if _inode_at(path) == locked:
            return locked  # the handle stays open for as long as the process lives
        os.close(handle)  # another file has its name by now


def _inode_at(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
