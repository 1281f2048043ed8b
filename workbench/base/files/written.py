"""Write below a folder that others may change: follow no link, and open regular files only.

A run's directory may lie in a folder shared with pods, where a program could replace a log by a
link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from workbench.base.errors import RunError


def open_to_write(path: Path, flags: int, within: Path) -> int:
    """Open a regular file for this user alone, without following a link or opening a pipe.

    Args:
        path: The file.
        flags: Flags of `os.open`, such as `os.O_WRONLY | os.O_CREAT`.
        within: Existing folder; links below it are refused.

    Raises:
        OSError: The path is no regular file, or cannot be opened.
    """
    *folders, name = path.relative_to(within).parts
    with contextlib.ExitStack() as opened:
        place = _folder(str(within), None, opened)
        for folder in folders:
            place = _folder(folder, place, opened)
        # Without O_NONBLOCK, opening a pipe would block before its type is known.
        handle = os.open(
            name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=place
        )
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def open_to_append(path: Path, within: Path) -> BinaryIO:
    """Open a file as `open_to_write` does, to add to its end."""
    return os.fdopen(
        open_to_write(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, within), "ab", buffering=0
    )


def write_all(out: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which may accept only a part per call."""
    while data:
        data = data[out.write(data) :]


def make_folders(folder: Path, within: Path) -> None:
    """Make a folder and its parents below `within`, private to the user. RunError: a link."""
    within.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = within
    for part in folder.relative_to(within).parts:
        place /= part
        place.mkdir(mode=0o700, exist_ok=True)
        if place.is_symlink():
            raise RunError(
                f"{place} is a link, and nothing that a pod left is written through one; remove it"
            )


def _folder(name: str, at: int | None, opened: contextlib.ExitStack) -> int:
    follow = 0 if at is None else os.O_NOFOLLOW
    handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=at)
    opened.callback(os.close, handle)
    return handle
