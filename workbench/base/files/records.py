"""Open, read, write and list files by path.

Only a regular file is opened: a link, a pipe or a device in the place of a file raises OSError at
once. A record has a largest size, and a folder a largest number of names. A written record is on
the disk when the function returns. Folders on the way to a file are followed; `gate` opens what a
pod or another person may have put below a folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from workbench.base.files.disk import full_disk_named

LARGEST = 16 << 20
"""Bytes of a record. A larger file is no record."""
LARGEST_ARCHIVE = 256 << 20
"""Bytes of the zip of a script's folder."""
MOST_NAMES = 100_000
"""Names in a folder, and files below a folder of a model or of results."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would block before its type is known.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def open_file(path: Path | str, flags: int, place: int | None = None) -> int:
    """Open a regular file, a new one for the user alone. Raise OSError for anything else.

    `place` is the descriptor of the folder of `path`; None: `path` is a path.
    """
    try:
        handle = os.open(path, flags | _FILE, 0o600, dir_fd=place)
    except ValueError as error:  # a name that holds a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def open_record(path: Path) -> BufferedReader:
    """Open a regular file to read, or raise OSError."""
    return os.fdopen(open_file(path, os.O_RDONLY), "rb")


def read_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """Return the content of a file. Raises OSError, also for more than `limit` bytes."""
    with open_record(path) as file:
        return content_of(file, path, limit)


def content_of(file: BinaryIO, path: Path, limit: int) -> bytes:
    """Return the content of an open file. Raise OSError for more than `limit` bytes."""
    data = b""
    whole = os.fstat(file.fileno()).st_size <= limit
    if whole:
        data = file.read(limit + 1)
        # The file may have grown since.
        whole = len(data) <= limit and file.seek(0, os.SEEK_END) <= limit
    if not whole:
        raise OSError(errno.EFBIG, f"it holds more than {limit >> 20} MiB", str(path))
    return data


def try_read(path: Path) -> bytes | None:
    """Return the content of a record; None for a missing or unreadable record."""
    try:
        return read_bytes(path)
    except OSError:
        return None


def facts_of(path: Path) -> os.stat_result | None:
    """Return what the system knows of a file, not following a link; None for a missing file.

    A file in a folder that cannot be read counts as missing.
    """
    try:
        return path.lstat()
    except OSError:
        return None


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 for a missing file."""
    facts = facts_of(path)
    return 0 if facts is None else facts.st_size


def read_text(path: Path) -> str:
    """Return the text of a record; invalid UTF-8 is escaped."""
    return read_bytes(path).decode("utf-8", errors="replace")


def read_end(path: Path, most: int = LARGEST) -> bytes:
    """Return the last bytes of a file."""
    with open_record(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal text."""
    with open_record(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_append(path: Path) -> BinaryIO:
    """Open a regular file for the user alone, to add to the end."""
    handle = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(handle, "ab", buffering=0)


def write_all(out: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which may accept only a part per call."""
    while data:
        data = data[out.write(data) :]


def write_bytes(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file atomically. A link there is replaced, and the link's target is untouched.

    Content and name are on the disk when the function returns: a power cut leaves the earlier file
    or the new one.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with full_disk_named(path.parent, len(data)):
        handle = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with full_disk_named(path.parent, len(data)), os.fdopen(handle, "wb") as out:
            os.fchmod(out.fileno(), mode)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync_folder(folder)
        finally:
            os.close(folder)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a text file atomically, in UTF-8."""
    write_bytes(path, text.encode(), mode=mode)


def sync_below(folder: Path) -> None:
    """Write a folder and all below it to the disk, so that nothing is lost when the power goes.

    Blocks as long as the disk needs for unwritten bytes. Links are not followed.

    Raises:
        OSError: The disk does not take a file.
    """
    for _, _, names, place in os.fwalk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if not stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                    continue
                handle = open_file(name, os.O_RDONLY, place)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        _sync_folder(place)


def _sync_folder(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder, and write names at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths of the regular files in a folder, sorted.

    Links, pipes and folders are left out. A missing folder, or a link, has no files.

    Raises:
        OSError: The folder cannot be read, or has more than `MOST_NAMES` names.
    """
    return [folder / name for name, mode in entries_of(folder, pattern) if stat.S_ISREG(mode)]


def folders_in(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the paths of the folders in a folder, sorted, as `files_in` returns files."""
    return [folder / name for name, mode in entries_of(folder, pattern) if stat.S_ISDIR(mode)]


def try_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Return files as `files_in`; [] for a folder that is closed or has too many names."""
    try:
        return files_in(folder, pattern)
    except OSError:
        return []


def try_folders(folder: Path, pattern: str = "*") -> list[Path]:
    """Return folders as `folders_in`; [] for a folder that is closed or has too many names."""
    try:
        return folders_in(folder, pattern)
    except OSError:
        return []


def files_below(folder: Path) -> list[Path]:
    """Return the paths of all regular files below a folder, sorted. Links are not followed.

    Raises:
        OSError: A folder cannot be read, or more than `MOST_NAMES` files are below.
    """
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        at = waiting.pop()
        for name, mode in entries_of(at):
            if stat.S_ISDIR(mode):
                waiting.append(at / name)
            elif stat.S_ISREG(mode):
                found.append(at / name)
        if len(found) + len(waiting) > MOST_NAMES:
            raise _too_many(folder)
    return sorted(found)


def entries_of(folder: Path, pattern: str = "*") -> list[tuple[str, int]]:
    """Return names and modes of a folder's entries, sorted by name."""
    try:
        place = os.open(folder, _FOLDER)
    except ValueError as error:  # a name that holds a NUL
        raise OSError(errno.EINVAL, str(error), str(folder)) from error
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return []
        raise
    found = []
    try:
        with os.scandir(place) as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_NAMES:
                    raise _too_many(folder)
                if not fnmatchcase(entry.name, pattern):
                    continue
                # A file may vanish while the folder is read.
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_mode))
    finally:
        os.close(place)
    return sorted(found)


def _too_many(folder: Path) -> OSError:
    return OSError(errno.EFBIG, f"it holds more than {MOST_NAMES:,} files", str(folder))
