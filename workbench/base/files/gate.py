"""The gate: files below a folder that a pod or another person may have changed.

Pods may share a run's directory, and another person may have given the directory to you. So any
folder in the directory may be a link to a folder of yours. The functions open the given root by
path, as the user names the root. Every part below the root is opened from the descriptor of the
folder above, and a link in the part's place is refused.

The gate stands where a pod chooses what is written, and where a record of another person lies
below a further folder. The functions of `records` open all other files.

Not promised: a time limit. A network file system that hangs also holds the calling thread, because
the kernel cannot interrupt a read from a regular file. Not promised either: the content. A program
with access to the folder may change a file during a read. `library` checks a folder before a
library opens the files by name, and a link made after the check is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from workbench.base.errors import RunError
from workbench.base.files.records import (
    LARGEST,
    MOST_NAMES,
    content_of,
    entries_of,
    open_file,
    replace_in,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_within(path: Path, within: Path) -> BufferedReader:
    """Open a regular file to read, following no link below `within`, or raise OSError."""
    with _place_of(path, within) as (place, name):
        return os.fdopen(open_file(name, os.O_RDONLY, place), "rb")


def read_within(path: Path, within: Path, limit: int = LARGEST) -> bytes:
    """Return the content of a file opened by `open_within`.

    Raises OSError, also for more than `limit` bytes.
    """
    with open_within(path, within) as file:
        return content_of(file, path, limit)


def open_to_write(path: Path, flags: int, within: Path) -> int:
    """Open a regular file for the user alone, without following a link or opening a pipe.

    Args:
        path: The file.
        flags: Flags of `os.open`, such as `os.O_WRONLY | os.O_CREAT`.
        within: Existing folder; links below it are refused.

    Raises:
        OSError: The path is no regular file, or cannot be opened.
    """
    with _place_of(path, within) as (place, name):
        return open_file(name, flags, place)


def write_within(path: Path, data: bytes, within: Path) -> None:
    """Replace a file as `write_bytes` does, following no link below `within`."""
    with _place_of(path, within) as (place, _):
        replace_in(place, path, data)


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
            waiting += [at / name for name, _ in reversed(entries_of(at))]
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


@contextlib.contextmanager
def _place_of(path: Path, within: Path) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of a path's folder, and the path's name there."""
    *folders, name = _parts(path, within) or ("",)
    with contextlib.ExitStack() as opened:
        try:
            place = _open_folder(str(within), None, opened)
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
