"""The gate: every access to a file below a run or cluster directory goes through these functions.

Pods may share the directory, and another person may have given the directory to you. So any name in
the directory may be a link, a pipe, a device, or a file of any size.

The functions open the given root by path, as the user names the root. Every part below the root is
opened from the descriptor of the folder above, and a link in the part's place is refused. A file is
opened without blocking, and only a regular file is accepted. Reading stops at a number of bytes,
and a listing at a number of names. `tests/test_gate.py` refuses any other access.

Not promised: a time limit. A network file system that hangs also holds the calling thread, because
the kernel cannot interrupt a read from a regular file. Not promised either: the content. A program
with access to the folder may change a file during a read. `library` checks a folder before a
library opens the files by name, and a link made after the check is followed.

On a pod, the folder of a run belongs to the user of the ranks, so a rank has the agent's
rights there. The agent therefore opens the files of the agent's own folder by path. Records and
logs of a rank are opened here nevertheless: a pipe in the place of a file would hold the agent.
Files from a pod are foreign bytes only for the keeper, and the keeper uses the gate.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path, PurePath
from typing import BinaryIO

from workbench.base.errors import RunError
from workbench.base.files.disk import full_disk_named
from workbench.base.files.folders import remove_folder

LARGEST = 16 << 20
"""Bytes of a record. A larger file is no record."""
LARGEST_ARCHIVE = 256 << 20
"""Bytes of the zip of a script's folder."""
MOST_NAMES = 100_000
"""Names in a folder, and files below a folder of a model or of results."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would block before its type is known.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def open_record(path: Path, within: Path | None = None) -> BufferedReader:
    """Open a regular file, following no link in `within` (default: file's folder), or OSError."""
    return os.fdopen(_open_file(path, os.O_RDONLY, within), "rb")


def read_bytes(path: Path, within: Path | None = None, limit: int = LARGEST) -> bytes:
    """Return the content of a file opened by `open_record`.

    Raises OSError, also for more than `limit` bytes.
    """
    with open_record(path, within) as file:
        data = b""
        whole = os.fstat(file.fileno()).st_size <= limit
        if whole:
            data = file.read(limit + 1)
            # The file may have grown since.
            whole = len(data) <= limit and file.seek(0, os.SEEK_END) <= limit
    if not whole:
        raise OSError(errno.EFBIG, f"it holds more than {limit >> 20} MiB", str(path))
    return data


def read_text(path: Path, within: Path | None = None, limit: int = LARGEST) -> str:
    """Return the text of a record opened by `open_record`; invalid UTF-8 is escaped."""
    return read_bytes(path, within, limit).decode("utf-8", errors="replace")


def read_end(path: Path, within: Path | None = None, most: int = LARGEST) -> bytes:
    """Return the last bytes of a file opened by `open_record`."""
    with open_record(path, within) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most)


def digest(path: Path, within: Path | None = None) -> str:
    """Return the SHA-256 of a file opened by `open_record`, as hexadecimal text."""
    with open_record(path, within) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_to_write(path: Path, flags: int, within: Path) -> int:
    """Open a regular file for the user alone, without following a link or opening a pipe.

    Args:
        path: The file.
        flags: Flags of `os.open`, such as `os.O_WRONLY | os.O_CREAT`.
        within: Existing folder; links below it are refused.

    Raises:
        OSError: The path is no regular file, or cannot be opened.
    """
    return _open_file(path, flags, within)


def open_to_append(path: Path, within: Path) -> BinaryIO:
    """Open a file as `open_to_write` does, to add to the end."""
    return os.fdopen(
        open_to_write(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, within), "ab", buffering=0
    )


def open_anew(path: Path, within: Path | None = None) -> BinaryIO:
    """Open an empty file for the user alone, in the place of an earlier file of the name."""
    flags = os.O_RDWR | os.O_CREAT
    handle = _open_file(path, flags, within)
    os.truncate(handle, 0)
    return os.fdopen(handle, "r+b")


def write_all(out: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file, which may accept only a part per call."""
    while data:
        data = data[out.write(data) :]


def write_bytes(path: Path, data: bytes, *, mode: int = 0o600, within: Path | None = None) -> None:
    """Replace a file atomically. A link there is replaced, and the link's target is untouched.

    Content and name are on the disk when the function returns: a power cut leaves the earlier file
    or the new one.
    """
    part = f".{path.name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
    with _place_of(path, within) as (place, name):
        with full_disk_named(path.parent, len(data)):
            handle = os.open(part, flags, 0o600, dir_fd=place)
        try:
            with full_disk_named(path.parent, len(data)), os.fdopen(handle, "wb") as out:
                os.fchmod(out.fileno(), mode)
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            os.replace(part, name, src_dir_fd=place, dst_dir_fd=place)
            _sync_folder(place)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=place)
            raise


def write_text(path: Path, text: str, *, mode: int = 0o600, within: Path | None = None) -> None:
    """Replace a text file atomically, in UTF-8."""
    write_bytes(path, text.encode(), mode=mode, within=within)


def sync_below(folder: Path) -> None:
    """Write a folder and all below it to the disk, so that nothing is lost when the power goes.

    Blocks as long as the disk needs for what is not written yet. Links are not followed.

    Raises:
        OSError: The disk does not take a file.
    """
    for _, _, names, place in os.fwalk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if not stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                    continue
                handle = os.open(name, os.O_RDONLY | _FILE, dir_fd=place)
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


def names_in(folder: Path, pattern: str = "*", within: Path | None = None) -> list[str]:
    """Return the names of the regular files in a folder, sorted.

    Links, pipes and folders are left out. A missing folder, or a link, has no names.

    Raises:
        OSError: The folder cannot be read, or has more than `MOST_NAMES` names.
    """
    return [name for name, mode in _entries(folder, pattern, within) if stat.S_ISREG(mode)]


def files_in(folder: Path, pattern: str = "*", within: Path | None = None) -> list[Path]:
    """Return the paths of the files named by `names_in`."""
    return [folder / name for name in names_in(folder, pattern, within)]


def folders_in(folder: Path, pattern: str = "*", within: Path | None = None) -> list[Path]:
    """Return the paths of the folders in a folder, sorted, as `names_in` returns names of files."""
    return [folder / name for name, mode in _entries(folder, pattern, within) if stat.S_ISDIR(mode)]


def is_empty(folder: Path, within: Path | None = None, *, ignored: str = "") -> bool:
    """Return whether a folder has no entry but `ignored`. A missing folder, or a link, has none."""
    return all(name == ignored for name, _ in _entries(folder, "*", within))


def files_below(folder: Path, within: Path | None = None) -> list[Path]:
    """Return the paths of all regular files below a folder, sorted. Links are not followed.

    Raises:
        OSError: A folder cannot be read, or more than `MOST_NAMES` files are below.
    """
    root = folder.parent if within is None else within
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        at = waiting.pop()
        for name, mode in _entries(at, "*", root):
            if stat.S_ISDIR(mode):
                waiting.append(at / name)
            elif stat.S_ISREG(mode):
                found.append(at / name)
        if len(found) + len(waiting) > MOST_NAMES:
            raise _too_many(folder)
    return sorted(found)


def make_folders(folder: Path, within: Path) -> None:
    """Make a folder and its parents below `within`, private to the user. RunError: a link."""
    within.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        place = _open_folder(str(within), None, opened)
        at = within
        for part in _parts(folder, within):
            at /= part
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=place)
            try:
                place = _open_folder(part, place, opened)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                if not at.is_symlink():
                    raise FileExistsError(errno.EEXIST, "it is not a folder", str(at)) from error
                raise RunError(
                    f"{at} is a link, and nothing that a pod left is written through one; remove it"
                ) from error


def close_to_others(path: Path, within: Path) -> None:
    """Set the mode of a regular file to 0600."""
    handle = _open_file(path, os.O_RDONLY, within)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


def remove(path: Path, within: Path | None = None) -> None:
    """Remove a file, or a link itself. A missing file is no error."""
    with contextlib.suppress(FileNotFoundError), _place_of(path, within) as (place, name):
        os.unlink(name, dir_fd=place)


def remove_tree(folder: Path, within: Path | None = None) -> None:
    """Remove a folder and all below it where possible. A link is not followed, and stays."""
    with contextlib.suppress(OSError), _place_of(folder, within) as (place, name):
        remove_folder(name, place)


def move(source: Path, target: Path, within: Path) -> None:
    """Move a file or folder to another place below `within`, and replace a file there."""
    with (
        _place_of(source, within) as (from_place, name),
        _place_of(target, within) as (place, new_name),
    ):
        os.replace(name, new_name, src_dir_fd=from_place, dst_dir_fd=place)


def library(path: Path | str) -> str:
    """Return the path of a file or folder that a library may open by name.

    The library is transformers, peft, safetensors, TensorBoard, pyarrow or sqlite. Links, pipes,
    devices and sockets below the path are refused by name: libraries follow links and wait for
    pipes. A missing path is left to the library's own error.

    Raises:
        RunError: Something below the path is neither a file nor a folder.
    """
    check_regular(Path(path))
    return str(path)


def check_regular(path: Path, what: str = "a run's model") -> None:
    """Raise RunError if a path, or anything below it, is neither a file nor a folder."""
    seen = 0
    waiting = [path]
    while waiting:
        at = waiting.pop()
        try:
            mode = at.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RunError(f"{at} cannot be read: {error.strerror}") from error
        if stat.S_ISDIR(mode):
            waiting += [at / name for name, _ in reversed(_entries(at, "*", at.parent))]
            seen += 1
            if seen + len(waiting) > MOST_NAMES:
                raise RunError(
                    f"{path} has more than {MOST_NAMES:,} files; remove what is not needed"
                )
        elif not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
            raise RunError(
                f"{at} is {kind}, and {what} is not read "
                "from links or pipes; put a copy of the file in place"
            )


def _open_file(path: Path, flags: int, within: Path | None) -> int:
    with _place_of(path, within) as (place, name):
        handle = os.open(name, flags | _FILE, 0o600, dir_fd=place)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


@contextlib.contextmanager
def _place_of(path: Path, within: Path | None) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of a path's folder, and the path's name there."""
    root = path.parent if within is None else within
    *folders, name = _parts(path, root) or ("",)
    with contextlib.ExitStack() as opened:
        try:
            place = _open_folder(str(root), None, opened)
            for folder in folders:
                place = _open_folder(folder, place, opened)
            yield place, name
        except ValueError as error:  # a name that holds a NUL
            raise OSError(errno.EINVAL, str(error), str(path)) from error


def _parts(path: Path, root: Path) -> tuple[str, ...]:
    """Return the names between a root and a path."""
    try:
        parts = path.relative_to(root).parts
    except ValueError as error:
        raise OSError(errno.EINVAL, f"it is not below {root}", str(path)) from error
    if ".." in parts:
        raise OSError(errno.EINVAL, f"it leads out of {root}", str(path))
    return parts


def _open_folder(name: str, at: int | None, opened: contextlib.ExitStack) -> int:
    follow = 0 if at is None else os.O_NOFOLLOW
    handle = os.open(name, _FOLDER | follow, dir_fd=at)
    opened.callback(os.close, handle)
    return handle


def _entries(folder: Path, pattern: str, within: Path | None) -> list[tuple[str, int]]:
    """Return names and modes of a folder's entries, sorted by name."""
    root = folder if within is None else within
    found = []
    with contextlib.ExitStack() as opened:
        try:
            place = _open_folder(str(root), None, opened)
            for part in _parts(folder, root):
                place = _open_folder(part, place, opened)
        except ValueError as error:  # a name that holds a NUL
            raise OSError(errno.EINVAL, str(error), str(folder)) from error
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return []
            raise
        with os.scandir(place) as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_NAMES:
                    raise _too_many(folder)
                if not fnmatchcase(entry.name, pattern):
                    continue
                # A file may vanish while the folder is read.
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_mode))
    return sorted(found)


def _too_many(folder: PurePath) -> OSError:
    return OSError(errno.EFBIG, f"it holds more than {MOST_NAMES:,} files", str(folder))
