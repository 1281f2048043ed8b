"""Write rows of `datasets` or `pyarrow` as JSON lines for a process that imports neither."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from workbench.finetune.data.columns import outer_columns
from workbench.finetune.data.forms.telling import telling_columns
from workbench.finetune.data.shares import first_rows

_BATCH = 256  # rows in memory at once
_BUFFER_BYTES = 1 << 20
_CONNECT_S = 3.0


def main() -> None:
    """Answer the request on standard input."""
    request = json.load(sys.stdin)
    code = 0
    try:
        for row in _rows(request):
            sys.stdout.write(json_line(row))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough rows
        pass
    # Process boundary: the parent reports the last line of standard error.
    except Exception as error:
        sys.stderr.write(f"\n{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        code = 1
    # Streams of `datasets` leave threads running, and a normal exit may wait for them forever.
    os._exit(code)


def open_hub(hub: Mapping[str, Any], split: str | None, *, streaming: bool = False) -> Any:
    """Open a dataset of the hub, or a split of the dataset."""
    from datasets import load_dataset

    config = hub.get("config")
    revision = hub.get("revision")
    return load_dataset(
        str(hub["name"]),
        name=config,
        revision=revision,
        split=split,
        streaming=streaming,
    )


def _rows(request: Mapping[str, Any]) -> Iterator[Any]:
    columns: Sequence[str] = request.get("columns") or ()
    ignore: Sequence[str] = request.get("ignore") or ()
    if "parquet" in request:
        yield from _parquet(request["parquet"], columns, ignore)
    elif "saved" in request:
        from datasets import load_from_disk

        saved = load_from_disk(request["saved"])
        yield saved.column_names
        yield from named_rows(saved.select_columns(_wanted(columns, saved.column_names, ignore)))
    elif "share" in request:
        loaded = open_hub(request["hub"], request["split"])
        yield from named_rows(loaded.select(range(first_rows(len(loaded), request["share"]))))
    elif "split" in request:
        # `datasets` cannot stream a part of a split.
        streaming = request["split"].isidentifier()
        yield from named_rows(open_hub(request["hub"], request["split"], streaming=streaming))
    else:
        _check_reachable(request["hub"]["name"])
        splits = open_hub(request["hub"], None, streaming=True)
        yield {
            name: next(named_rows(split.take(1)), None)
            for name, split in splits.items()
            if name in request["first"]
        }
        yield list(splits)


def _check_reachable(name: str) -> None:
    """Raise OSError at once if the hub is unreachable; `datasets` retries for half a minute."""
    if not Path(name).is_dir() and not getproxies():
        from huggingface_hub.constants import ENDPOINT

        address = urlsplit(ENDPOINT)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((str(address.hostname), port), _CONNECT_S).close()


def _parquet(path: str, columns: Sequence[str], ignore: Sequence[str]) -> Iterator[Any]:
    """Yield the names of all columns, then the rows."""
    from pyarrow.parquet import ParquetFile

    # No memory map and no prefetch: either would hold the whole file in memory.
    with ParquetFile(
        path,
        memory_map=False,
        pre_buffer=False,
        buffer_size=_BUFFER_BYTES,
    ) as file:
        names = file.schema_arrow.names
        yield names
        classes = _classes(_features(file.schema_arrow.metadata or {}))
        for batch in file.iter_batches(batch_size=_BATCH, columns=_wanted(columns, names, ignore)):
            for row in batch.to_pylist():
                yield _with_classes(row, classes)


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return the features that `datasets` wrote into a Parquet file."""
    found = json.loads(metadata.get(b"huggingface", b"{}"))
    return found.get("info", {}).get("features") or {}


def named_rows(dataset: Any) -> Iterator[Any]:
    """Yield the rows of a dataset with the names of classes."""
    features = dataset.features
    classes = _classes(features.to_dict() if features is not None else {})
    for row in dataset:
        yield _with_classes(row, classes)


def _classes(features: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
    """Return the names of the classes of every column that holds numbers of classes."""
    return {
        name: feature["names"]
        for name, feature in features.items()
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel"
    }


def _with_classes(row: Any, classes: Mapping[str, Sequence[str]]) -> Any:
    """Return a row with the name of a class in place of its number; -1 is no class."""
    for name in classes.keys() & row.keys():
        number = row[name]
        row[name] = None if number in (None, -1) else classes[name][number]
    return row


def _wanted(columns: Sequence[str], names: Sequence[str], ignore: Sequence[str]) -> list[str]:
    """Return wanted and telling columns; all columns if a wanted one is missing."""
    wanted = {outer for named in columns for outer in outer_columns(named, names)}
    if not columns or not wanted <= {*names}:
        return list(names)  # the caller reports the missing column
    wanted |= telling_columns(names).difference(ignore)
    return [name for name in names if name in wanted]


def json_line(row: Any) -> str:
    """Return a row of a table as a line of JSON, in which dates and decimals are text."""
    try:
        return json.dumps(row, allow_nan=False, default=_plain) + "\n"
    except ValueError:
        return json.dumps(_finite(row), default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Return a value of a table in a form that JSON has. Binary text is text."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"bytes": len(value)}


def _finite(value: Any) -> Any:
    """Replace NaN and infinite numbers by None. JSON cannot express such numbers."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(inner) for key, inner in value.items()}
        case str() | bytes():
            return value
        case Iterable():
            return [_finite(inner) for inner in value]
    return value
