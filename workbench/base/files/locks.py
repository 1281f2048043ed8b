"""Locks of files, by which a process shows for as long as it lives that a folder is its own."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system answers that has no such locks: Lustre by default, some NFS, some FUSE."""
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_locked(path: Path) -> bool:
    """Whether a process holds a file locked; False without file or locks. Raises OSError where nobody can say.

    The look itself holds a shared lock for some microseconds: whoever wants the lock tries more than once.
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
    """Return the sentence about a file that cannot be locked, with what to do where the file system has no locks."""
    words = f"{path} cannot be locked ({error.strerror})"
    if error.errno in NO_LOCKS:
        words += (
            ": the file system there has no flock. Choose a folder on another disk with Cluster(…, path=…), or have it"
            " mounted with locks (Lustre: the option flock)"
        )
    return words
