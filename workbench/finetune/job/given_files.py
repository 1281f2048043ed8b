"""Read the JSON files of a model's folder. An error names the file, the place and the remedy."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, read_bytes
from workbench.base.json_values import Json

POINTER = b"version https://git-lfs"
_LARGEST = 256 << 20  # the largest tokenizer.json known has 33 MB
_MOST_KEPT = 4 << 20
_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")
_SAVE = "Save the file as UTF-8 without a byte order mark"


def read_object(path: Path) -> Json:
    """Return the JSON object in a file of a model; empty if there is no file. Links are followed.

    Raises:
        ConfigError: The file is no JSON object, has a byte order mark, or cannot be read.
    """
    if not is_there(path):
        return {}
    # The folders of the hub's cache consist of links.
    real = Path(os.path.realpath(path))
    try:
        facts = real.stat()
        if facts.st_size > _MOST_KEPT:
            return _parsed(path, real)
        return _object(path, real, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def refuse_pointer(path: Path, begin: bytes) -> None:
    """Raise ConfigError if a file begins as a pointer of git-lfs in place of its content."""
    if begin.startswith(POINTER):
        raise ConfigError(
            f"{path} is a pointer of git-lfs and not the file. Run `git lfs pull` in the folder"
        )


@lru_cache(maxsize=64)
def _object(path: Path, real: Path, _size: int, _mtime_ns: int) -> Json:
    return _parsed(path, real)


def _parsed(path: Path, real: Path) -> Json:
    data = read_bytes(real, limit=_LARGEST)
    refuse_pointer(path, data)
    if data.startswith(_MARK):
        raise ConfigError(f"{path} begins with a byte order mark. {_SAVE}")
    if data.startswith(_WIDE_MARKS):
        raise ConfigError(f"{path} is UTF-16 text. {_SAVE}")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}). {_SAVE}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} line {error.lineno} column {error.colno}: {error.msg}; it must be JSON. "
            "Correct the file, or take the file from the model's author"
        ) from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply. Take another copy of the file") from None
    except ValueError:
        raise ConfigError(f"{path} has a number of too many digits. Correct the file") from None
    match value:
        case dict():
            return value
    raise ConfigError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
