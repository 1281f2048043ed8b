"""The gate: files below a folder that a pod or another person may have changed.

Pods may share a run's directory, and another person may have given the directory to you. So any
folder in the directory may be a link to a folder of yours. `pinned_folder` opens every folder on
the way from the folder above, refuses a link, and yields a path of the opened folder itself. The
functions of `records` open the files there, and all other files by path.

The gate stands where a pod chooses the names of written files, and where a record of another person
lies below a further folder.

Not promised: a time limit. A hanging network file system also holds the calling thread, because the
kernel cannot interrupt a read from a regular file. Not promised either: the content. A program with
access to the folder may change a file during a read. `library` checks a folder before a library
opens the files by name, and a link made after the check is followed. A hard link is a file like any
other: backups have many, and Linux lets no user link a file that the user may not write
(`fs.protected_hardlinks`).
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
from workbench.base.files.records import LARGEST, MOST_NAMES, content_of, entries_of, open_record

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextlib.contextmanager
def pinned_folder(folder: Path, within: Path, *, make: bool = False) -> Iterator[Path]:
    """Yield a path of an opened folder, also after another folder or a link took the place.

    Args:
        folder: The folder.
        within: Folder of the user, with the way to `folder`. No link below is followed.
        make: Make missing folders, private to the user.

    Raises:
        OSError: The folder is not below `within`, or cannot be opened.
        RunError: A folder that `make` asks for is a link or a file.
    """
    with contextlib.ExitStack() as opened:
        at = within
        try:
            parts = folder.relative_to(within).parts
            if ".." in parts:
                raise ValueError(f"it leads out of {within}")
            if make:
                within.mkdir(mode=0o700, parents=True, exist_ok=True)
            place = os.open(within, _FOLDER)
            opened.callback(os.close, place)
            for part in parts:
                at /= part
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=place)
                place = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
                opened.callback(os.close, place)
        except ValueError as error:  # also a name that holds a NUL
            raise OSError(errno.EINVAL, str(error), str(folder)) from error
        except OSError as error:
            if not make or error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise RunError(
                f"{at} is a link or a file, and nothing that a pod left is written through one; "
                "remove it"
            ) from error
        yield Path(f"/proc/self/fd/{place}")


def make_folders(folder: Path, within: Path) -> None:
    """Make a folder and its parents below `within`, as `pinned_folder` does."""
    with pinned_folder(folder, within, make=True):
        pass


def open_within(path: Path, within: Path) -> BufferedReader:
    """Open a regular file to read, following no link below `within`, or raise OSError."""
    with pinned_folder(path.parent, within) as folder:
        return open_record(folder / path.name)


def read_within(path: Path, within: Path, limit: int = LARGEST) -> bytes:
    """Return the content of a file opened by `open_within`.

    Raises OSError, also for more than `limit` bytes.
    """
    with open_within(path, within) as file:
        return content_of(file, path, limit)


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
