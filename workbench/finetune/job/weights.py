"""Check the files of weights in a model's folder. Only names, sizes and headers are read."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path, PurePosixPath

from workbench.base.errors import ConfigError
from workbench.base.files import is_there
from workbench.base.json_values import Json, items, parse_json, part, text, whole
from workbench.finetune.job.given_files import POINTER, read_object, refuse_pointer
from workbench.finetune.options.model.folders import (
    ADAPTER_WEIGHTS,
    ADAPTERS,
    INDEXES,
    SINGLE,
    way_out,
)

_AGAIN = "Copy the file again"
_LARGEST_HEADER = 100_000_000  # the limit of safetensors
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_PICKLE = b"\x80"  # torch before 1.6


def weight_names(folder: Path) -> list[str]:
    """Return the names of the files of weights that transformers reads in a folder.

    The list of divided weights comes first. Empty for a folder without weights.

    Raises:
        ConfigError: The list of divided weights is damaged, or names a file outside the folder.
    """
    named = text(read_object(folder / "config.json").get("transformers_weights"))
    if named:
        return [_inside(named, folder / "config.json")]
    # The order is that of transformers.
    for single, index in zip(SINGLE, INDEXES, strict=True):
        if is_there(folder / single):
            return [single]
        if is_there(folder / index):
            files = part(read_object(folder / index), "weight_map").values()
            names = {_inside(text(name), folder / index) for name in files}
            if not names:
                raise ConfigError(f"{folder / index} has no 'weight_map' with files. {_AGAIN}")
            return [index, *sorted(names)]
    return []


def check_weights(folder: Path) -> None:
    """Raise ConfigError if weights are missing in a model's folder, or if a file is cut short."""
    names = weight_names(folder)
    if not names:
        raise ConfigError(f"model folder {str(folder)!r} has no weights; {way_out(folder)}")
    missing = [name for name in names if not is_there(folder / name)]
    if missing:
        which = folder / (names[0] if len(names) > 1 else "config.json")
        raise ConfigError(
            f"{which} names {missing[0]!r}, and the file is not in the folder: {len(missing)} of "
            f"{len(names) - 1 or 1} files of weights are missing. Copy the missing files, or save "
            "the model again"
        )
    tensors = set[str]()
    for name in names:
        if not name.endswith(".json"):
            tensors |= _tensors(folder / name).keys()
    if len(names) > 1 and names[1].endswith(".safetensors"):
        for tensor, file in part(read_object(folder / names[0]), "weight_map").items():
            if tensor not in tensors:
                raise ConfigError(
                    f"{folder / names[0]} names the tensor {tensor!r} in {file!r}, and no file of "
                    "weights has the tensor. Save the model again"
                )


def elements_of(folder: Path) -> int:
    """Return the number of elements of a folder's weights. 0: unknown without reading all weights.

    Only the headers of safetensors files have the sizes.
    """
    files = [folder / name for name in weight_names(folder) if not name.endswith(".json")]
    if not all(map(is_there, files)):
        return 0
    return sum(size for file in files for size in _tensors(file).values())


def check_adapters(folder: Path) -> None:
    """Raise ConfigError if a folder of adapters has no weights, or if the file is cut short."""
    names = [name for name in ADAPTER_WEIGHTS if is_there(folder / name)]
    if not names:
        raise ConfigError(
            f"{folder} has {ADAPTERS} and no {ADAPTER_WEIGHTS[0]}, the weights of the adapters. "
            "Save the adapters with save_pretrained of peft"
        )
    _tensors(folder / names[0])


def _inside(name: str, source: Path) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ConfigError(
            f"{source} names the file of weights {name[:200]!r}, which is not in the folder. Save "
            "the model again"
        )
    return name


def _tensors(path: Path) -> Mapping[str, int]:
    """Return the elements of the tensors of a file by name; empty for a file of torch."""
    try:
        facts = path.stat()
        return _tensors_at(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=1024)
def _tensors_at(path: Path, size: int, _mtime_ns: int) -> Mapping[str, int]:
    with path.open("rb") as file:
        begin = file.read(len(POINTER))
        refuse_pointer(path, begin)
        if path.suffix != ".safetensors":
            if not begin.startswith(_PICKLE) and not zipfile.is_zipfile(path):
                raise ConfigError(
                    f"{path} has {size} bytes and is no complete file of torch: its end is "
                    f"missing. {_AGAIN}"
                )
            return {}
        length = int.from_bytes(begin[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > _LARGEST_HEADER:
            raise ConfigError(f"{path} has {size} bytes and is no safetensors file. {_AGAIN}")
        file.seek(_LENGTH_BYTES, os.SEEK_SET)
        header = _header(file.read(length), path)
    needed = _LENGTH_BYTES + length + max(map(_end, header.values()), default=0)
    if needed != size:
        raise ConfigError(f"{path} has {size} bytes, and its header names {needed}. {_AGAIN}")
    return {name: _elements(entry) for name, entry in header.items()}


def _header(data: bytes, path: Path) -> Mapping[str, Json]:
    try:
        header = part({"header": parse_json(data)}, "header")
    except ValueError as error:
        raise ConfigError(f"{path} is no safetensors file: {error}. {_AGAIN}") from error
    return {name: part(header, name) for name in header if name != "__metadata__"}


def _elements(entry: Json) -> int:
    """Return the number of elements of a tensor."""
    return prod(whole(size) or 0 for size in items(entry.get("shape")))


def _end(entry: Json) -> int:
    """Return the last byte of a tensor after the header."""
    offsets = items(entry.get("data_offsets"))
    return (whole(offsets[-1]) or 0) if offsets else 0
