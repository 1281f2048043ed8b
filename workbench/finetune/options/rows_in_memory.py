"""Rows in memory as a file: a DataFrame, a `datasets.Dataset`, a list of dicts.

A job is text that pods read, so rows are written once, under the digest of their content.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time as clock
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, write_bytes
from workbench.base.files.folders import make_private
from workbench.base.files.records import facts_of

__all__ = ["with_files"]

_READERS = ("to_pylist", "to_dicts")  # of pyarrow, of polars
_ROWS = "a list of dicts, a pandas or polars DataFrame, a datasets.Dataset or a pyarrow Table"
_KEPT_S = 30 * 24 * 3600
"""Age of an unused file of rows from which on the file is removed."""
_WITH_ROWS = ("train", "eval", "dataset")
_PARTS = {
    "train": "train",
    "training": "train",
    "validation": "eval",
    "valid": "eval",
    "eval": "eval",
    "test": "eval",
}
"""Options of a dataset by the names of the parts of a `datasets.DatasetDict`."""


def with_files(dataset: object) -> object:
    """Return a dataset option with a file in the place of rows in memory.

    The same rows have the same file. A `datasets.DatasetDict` becomes its parts.

    Raises:
        ConfigError: A row is no mapping, a column holds values that JSON has not, or the parts of
            a dataset have other names than those to train and to evaluate.
    """
    if _is_rows(dataset):
        return _as_file(dataset)
    match dataset:
        case {"parts": [*parts], **options}:  # a mix
            return {**options, "parts": [with_files(part) for part in parts]}
        case Mapping() if dataset and all(map(_is_rows, dataset.values())):
            return _parts_as_files(dataset)
        case Mapping():
            return {
                name: _as_file(value) if name in _WITH_ROWS and _is_rows(value) else value
                for name, value in dataset.items()
            }
    return dataset


def _is_rows(value: object) -> bool:
    if isinstance(value, str | Mapping | os.PathLike):
        return False
    if isinstance(value, list):  # texts are names of files
        return not all(isinstance(item, str) for item in value) or not value
    return any(hasattr(value, name) for name in (*_READERS, "to_json"))


def _as_file(rows: object) -> str:
    lines = [_line(number, row) for number, row in enumerate(_records(rows))]
    if not lines:
        raise ConfigError("dataset has no rows")
    content = "".join(lines).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "deepspeed-workbench" / "rows"
    path = folder / f"{hashlib.sha256(content).hexdigest()[:32]}.jsonl"
    if not is_there(path):
        make_private(folder)
        write_bytes(path, content)
        _remove_unused(folder)
    elif os.access(path, os.W_OK):
        # The age of a file counts from its last use.
        os.utime(path)
    return str(path)


def _remove_unused(folder: Path) -> None:
    """Remove files that no job was made of for 30 days; runs have copies of their own."""
    oldest = clock.time() - _KEPT_S
    for other in folder.iterdir():
        # Another process may remove the same file.
        seen = facts_of(other)
        if seen is not None and seen.st_mtime < oldest:
            other.unlink(missing_ok=True)


def _parts_as_files(parts: Mapping[str, object]) -> dict[str, object]:
    options = [_PARTS.get(name, "") for name in parts]
    if "train" not in options or "" in options or len(set(options)) < len(options):
        names = ", ".join(map(repr, parts))
        raise ConfigError(
            f"dataset has the parts {names}, and a job has a part to train and a part to "
            "evaluate. Write dataset={'kind': 'files', 'train': …, 'eval': …}"
        )
    files = map(_as_file, parts.values())
    return {"kind": "files", **dict(zip(options, files, strict=True))}


def _records(rows: Any) -> Iterable[object]:
    if isinstance(rows, list):
        return rows
    for name in _READERS:
        if hasattr(rows, name):
            return list(getattr(rows, name)())
    if hasattr(rows, "to_dict") and hasattr(rows, "index"):  # pandas
        return _of_pandas(rows)
    if hasattr(rows, "column_names") and hasattr(rows, "__len__"):  # datasets.Dataset
        return list(rows)
    raise ConfigError(
        f"dataset is a {type(rows).__name__}, whose rows cannot be listed. Give {_ROWS}"
    )


def _of_pandas(frame: Any) -> Iterator[dict[str, object]]:
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise ConfigError("dataset is a DataFrame with two columns of one name; rename a column")
    if frame.index.name is not None:
        raise ConfigError(
            f"dataset is a DataFrame with the index {frame.index.name!r}, which is no column. "
            "Write dataset=df.reset_index(), or drop the index: df.reset_index(drop=True)"
        )
    columns = {name: frame[name].tolist() for name in names}
    missing = frame.isna().to_numpy().tolist()
    for number, empty in enumerate(missing):
        yield {
            name: None if is_empty else columns[name][number]
            for name, is_empty in zip(names, empty, strict=True)
        }


def _line(number: int, row: object) -> str:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"dataset row {number} is of type {type(row).__name__}; a row is a dict with a key for "
            "every column"
        )
    plain = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise ConfigError(f"dataset column {name!r} has no text as its name; rename the column")
        try:
            plain[name] = _plain(value)
        except (TypeError, UnicodeEncodeError):
            raise ConfigError(
                f"dataset row {number}, column {name!r} has a value of type "
                f"{type(value).__name__} that JSON has not. Convert the column to text or numbers, "
                "or drop the column"
            ) from None
    return json.dumps(plain, ensure_ascii=False) + "\n"


def _plain(value: Any) -> object:
    """Return a value as JSON has it. Raises TypeError for others."""
    if isinstance(value, float) and math.isnan(value):  # an empty cell of a table
        return None
    if isinstance(value, float) and math.isinf(value):
        raise TypeError("an infinite number")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is no text
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist())
    raise TypeError(type(value).__name__)
