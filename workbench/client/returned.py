"""What the ranks of a function returned: JSON and safetensors that pods left. Nothing here reads a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.files import is_there, read_bytes
from workbench.base.json_values import parse_json
from workbench.rundir.make.function import RETURNED
from workbench.rundir.paths import RunPaths

_LARGEST = 4 << 30  # bytes of a rank's arrays; they are in this process's memory then


def returned(paths: RunPaths, ranks: int) -> list[object]:
    """Return the value of each rank, in their order; arrays and tensors as arrays of numpy."""
    return [_of_rank(paths, rank) for rank in range(ranks)]


def _of_rank(paths: RunPaths, rank: int) -> object:
    # Rank 0's pod leaves its files at the top, others below their name.
    folders = [
        paths.outputs,
        *sorted(path for path in paths.outputs.glob("*") if path.name != RETURNED),
    ]
    for folder in folders:
        values = folder / RETURNED / f"rank-{rank}.json"
        if not is_there(values):
            continue
        try:
            tree = parse_json(read_bytes(values, paths.root))
            return _value(tree, _arrays(values.with_suffix(".safetensors"), paths.root))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{values} cannot be read: {error or type(error).__name__}") from error
    raise RunError(
        f"rank {rank} of {paths.root} returned nothing: it was no function, has not ended, or failed"
    )


def _arrays(file: Path, root: Path) -> Mapping[str, Any]:
    if not is_there(file):
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return dict(load(read_bytes(file, root, _LARGEST)))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _value(tree: object, arrays: Mapping[str, Any]) -> object:
    match tree:
        case {"array": str() as name, **rest} if not rest:
            return arrays[name]
        case {"list": list() as items, **rest} if not rest:
            return [_value(item, arrays) for item in items]
        case {"tuple": list() as items, **rest} if not rest:
            return tuple(_value(item, arrays) for item in items)
        case {"dict": list() as pairs, **rest} if not rest:
            return {key: _value(item, arrays) for key, item in pairs}
        case str() | int() | float() | None:
            return tree
    raise ValueError("it does not hold what ranks write")
