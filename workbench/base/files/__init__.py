"""Records as JSON, and files that a user names.

`records` opens, writes and lists files. The other modules handle files changed by a pod or by
another person, full disks, locks and private folders.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, Unreadable, check_type
from workbench.base.files.records import (
    facts_of,
    open_record,
    read_bytes,
    read_text,
    write_bytes,
    write_text,
)
from workbench.base.json_values import json_text, parse_record

__all__ = (
    "KeptFile",
    "check_working_directory",
    "is_certain",
    "is_folder",
    "is_missing",
    "is_there",
    "load_json",
    "not_ours",
    "open_record",
    "read_bytes",
    "read_given",
    "read_json",
    "read_known",
    "read_text",
    "unreadable",
    "user_path",
    "write_bytes",
    "write_json",
    "write_text",
)


def write_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600) -> None:
    """Replace a record atomically. `load_json` reads every written record."""
    write_text(path, json_text(data) + "\n", mode=mode)


def read_given(path: Path) -> str:
    """Return the UTF-8 text of a file that a user named, links followed.

    Raises OSError, ValueError; of devices too.
    """
    # `os.path.realpath` never raises for a cycle of links.
    return read_bytes(Path(os.path.realpath(path))).decode("utf-8")


def is_there(path: Path) -> bool:
    """Return whether a file exists at a path; False for an overlong or invalid path."""
    return os.path.exists(path)  # noqa: PTH110 (Path.exists raises for those)


def is_folder(path: Path) -> bool:
    """Whether there is a folder at a path; False for an overlong or invalid path."""
    return os.path.isdir(path)  # noqa: PTH112 (as above)


def not_ours(path: Path) -> str:
    """Return a message if another user owns the path or may write to it, else an empty text."""
    facts = path.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & stat.S_IWOTH:
        return f"{path} belongs to another user, or others may write to it"
    return ""


def user_path(path: str | Path) -> Path:
    """Return a path as a user writes it, with `~` filled in. Raise ConfigError for no path."""
    check_type("a path", path, (str, os.PathLike), "text or a Path")
    if "\0" in str(path):
        raise ConfigError(f"the path {str(path)[:200]!r} has a NUL, which no path can have")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the path {str(path)!r} begins with a home folder that is not there: {error}"
        ) from error


def unreadable(path: Path, error: OSError) -> Unreadable:
    """Make the error about a file that may exist."""
    return Unreadable(f"{path} cannot be read at this moment: {error.strerror or error}")


def is_certain(error: OSError) -> bool:
    """Return whether an error proves that the file is missing or is no record."""
    return error.errno in _CERTAIN


def is_missing(path: Path) -> bool:
    """Whether there is no file at a path. Raises Unreadable if the system reports another error."""
    try:
        os.stat(path)  # noqa: PTH116 (Path.stat is the same)
    except OSError as error:
        if not is_certain(error):
            raise unreadable(path, error) from error
        return True
    except ValueError:  # a path that holds a NUL
        return True
    return False


def check_working_directory() -> None:
    """Raise ConfigError if the working directory has been deleted."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the working directory of this process has been deleted, so relative paths "
            "lead nowhere; go to another folder first: os.chdir(os.path.expanduser('~'))"
        ) from error


def load_json(path: Path) -> dict[str, object]:
    """Return a JSON object from a run's or cluster's directory. A RunError names the file."""
    try:
        match parse_record(read_bytes(path).decode()):
            case dict() as record:
                return record
        problem = "it is not a JSON object"
    except OSError as error:
        if not is_certain(error):
            raise unreadable(path, error) from error
        problem = _WORDS.get(error.errno or 0, error.strerror or str(error))
    except ValueError as error:
        problem = f"it is not JSON ({error})"
    raise RunError(
        f"{path} cannot be read: {problem}; put back a whole copy, or remove {path.parent}"
    )


def read_json(path: Path) -> dict[str, object]:
    """Return a JSON object, empty for a missing or broken file."""
    try:
        return load_json(path)
    except RunError:
        return {}


def read_known(path: Path) -> dict[str, object]:
    """Return a JSON object, empty for a missing or broken file.

    Raises Unreadable if the file may exist.
    """
    try:
        return load_json(path)
    except Unreadable:
        raise
    except RunError:
        return {}


_CERTAIN = (
    *(
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENXIO,
        errno.EFBIG,
        errno.EISDIR,
    ),
    errno.ENAMETOOLONG,
)
_WORDS = {
    errno.ELOOP: "it is a link, and no link is followed there",
    errno.ENOTDIR: "its folder is a file",
    errno.ENOENT: "there is no such file",
    errno.ENXIO: "it is not a regular file",
}


class KeptFile:
    """A file that is restored if changed. Several threads may write the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: Mapping[str, object] | None = None
        self._stamp: tuple[int, int, int] | None = None
        self._lock = threading.Lock()

    def write(self, data: Mapping[str, object]) -> None:
        """Replace the file. Raises OSError; `mend` tries again."""
        with self._lock:
            self._data = data
            self._stamp = None
            self._write(data)

    def mend(self, *, beat: bool = False) -> None:
        """Write the file again if it was changed; costs a `stat` otherwise. Raises OSError.

        With `beat`, the time of an unchanged file is renewed, as a sign of life of the writer.
        """
        with self._lock:
            if self._data is None:
                return
            if self._stamp is None or self._look() != self._stamp:
                self._write(self._data)
            elif beat:
                now = time.time_ns()
                os.utime(self._path, ns=(now, now), follow_symlinks=False)
                after = self._look()
                # Still our file.
                if after is not None and (after[0], after[2]) == (self._stamp[0], self._stamp[2]):
                    self._stamp = after

    def _write(self, data: Mapping[str, object]) -> None:
        write_json(self._path, data)
        self._stamp = self._look()

    def _look(self) -> tuple[int, int, int] | None:
        facts = facts_of(self._path)
        return None if facts is None else (facts.st_ino, facts.st_mtime_ns, facts.st_size)
