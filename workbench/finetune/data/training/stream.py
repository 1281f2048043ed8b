"""Write rows that `datasets` or `pyarrow` can read as JSON lines, for a process that imports neither."""

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

_BATCH = 256  # rows in memory at once
_BUFFER_BYTES = 1 << 20
_CONNECT_S = 3.0


def main() -> None:
    """Answer the request on standard input."""
    request, code = json.load(sys.stdin), 0
    try:
        for row in _rows(request):
            sys.stdout.write(_line(row))
        sys.stdout.flush()
    except BrokenPipeError:  # nobody wants more
        pass
    except (
        Exception
    ) as error:  # the process ends here: its last word is what the other side reports
        sys.stderr.write(f"\n{type(error).__name__}: {' '.join(str(error).split())}\n")
        sys.stderr.flush()
        code = 1
    os._exit(code)  # streams of `datasets` leave threads behind, on which an exit may hang


def open_hub(hub: Mapping[str, Any], split: str | None, *, streaming: bool = False) -> Any:
    """Open a dataset of the hub, or one of its splits."""
    from datasets import load_dataset

    config, revision = hub.get("config"), hub.get("revision")
    return load_dataset(
        str(hub["name"]), name=config, revision=revision, split=split, streaming=streaming
    )


def _rows(request: Mapping[str, Any]) -> Iterator[Any]:
    columns: Sequence[str] = request.get("columns") or ()
    telling: Sequence[str] = request.get("telling") or ()
    if "parquet" in request:
        yield from _parquet(request["parquet"], columns, telling)
    elif "saved" in request:
        from datasets import load_from_disk

        saved = load_from_disk(request["saved"])
        yield saved.column_names
        yield from saved.select_columns(_wanted(columns, saved.column_names, telling))
    elif "split" in request:
        # What is only a part of a split cannot be streamed.
        yield from open_hub(
            request["hub"], request["split"], streaming=request["split"].isidentifier()
        )
    else:
        _check_reachable(request["hub"]["name"])
        splits = open_hub(request["hub"], None, streaming=True)
        yield {
            name: next(iter(split.take(1)), None)
            for name, split in splits.items()
            if name in request["first"]
        }
        yield list(splits)


def _check_reachable(name: str) -> None:
    """Fail at once where no connection to the hub can be made: `datasets` tries for half a minute."""
    if not Path(name).is_dir() and not getproxies():
        from huggingface_hub.constants import ENDPOINT

        address = urlsplit(ENDPOINT)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((str(address.hostname), port), _CONNECT_S).close()


def _parquet(path: str, columns: Sequence[str], telling: Sequence[str]) -> Iterator[Any]:
    """Yield the names of all columns, then the rows."""
    from pyarrow.parquet import ParquetFile

    # Nothing is mapped or fetched ahead: either keeps the whole file in memory.
    with ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
        names = file.schema_arrow.names
        yield names
        for batch in file.iter_batches(batch_size=_BATCH, columns=_wanted(columns, names, telling)):
            yield from batch.to_pylist()


def _wanted(columns: Sequence[str], names: Sequence[str], telling: Sequence[str]) -> list[str]:
    """Return the wanted columns and those with a telling name; all where one of those wanted is not there."""
    if not columns or not {*columns} <= {*names}:
        return list(names)  # the one who asked then names what there is
    return [name for name in names if name in columns or name.casefold() in telling]


def _line(row: Any) -> str:
    try:
        return json.dumps(row, allow_nan=False, default=str) + "\n"
    except ValueError:
        return json.dumps(_finite(row), default=str) + "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON has no word for, as tables hold them where nothing is, by None."""
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
