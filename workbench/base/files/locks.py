"""File locks, with which a live process claims a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without such locks: Lustre by default, some NFS, some FUSE."""
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on a file; False without file or locks.

    Raises OSError if the answer is unknown. The check holds a shared lock for some microseconds, so
    try more than once to take a lock.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            return False
        raise
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(handle)
    return False


def no_locks_there(path: Path, error: OSError) -> str:
    """Return the message about a file that cannot be locked, with a remedy for its file system."""
    words = f"{path} cannot be locked ({error.strerror})"
    if error.errno in NO_LOCKS:
        words += (
            ": the file system there has no flock. Choose a folder on another disk with "
            "Cluster(…, path=…), or have it mounted with locks (Lustre: the option flock)"
        )
    return words
