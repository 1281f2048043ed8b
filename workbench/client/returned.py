"""Values that a function's ranks returned, read from JSON and safetensors, never from pickles."""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.base.errors import RunError
from workbench.base.files import gate, is_there, read_bytes
from workbench.base.json_values import parse_json
from workbench.rundir.make.function import RETURNED
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import RunFault

_LARGEST = 4 << 30  # bytes of a rank's arrays, all read into this process's memory


def returned(paths: RunPaths, ranks: int) -> list[object]:
    """Return the values of the ranks in their order; arrays and tensors as numpy arrays."""
    return [_of_rank(paths, rank) for rank in range(ranks)]


def raised_by(function: Callable[..., object], fault: RunFault | None) -> BaseException | None:
    """Return an exception of the type and message that a function raised on a rank.

    None: the rank did not end with an exception, or its type is not known here.
    """
    if fault is None or fault.rank is None:
        return None
    names = getattr(inspect.unwrap(function), "__globals__", {})
    kind = {**vars(builtins), **names}.get(fault.kind)
    if kind is None:  # a type of an imported module, such as subprocess.CalledProcessError
        modules = [each for each in names.values() if isinstance(each, ModuleType)]
        kinds = (vars(module).get(fault.kind) for module in modules)
        kind = next(filter(None, kinds), None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return None
    message = fault.message
    if issubclass(kind, KeyError):  # its text is the repr of the key
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            message = ast.literal_eval(message)
    try:
        # Without __init__, whose arguments are not known.
        cause = kind.__new__(kind, message)
    except TypeError:  # a type such as ExceptionGroup takes more
        return None
    # The text of some types needs what their __init__ sets.
    with suppress(AttributeError, LookupError):
        if str(cause) == fault.message:
            return cause
    members = {"__str__": lambda _: fault.message, "__module__": kind.__module__}
    told: type[BaseException] = type(kind.__name__, (kind,), members)
    return told.__new__(told, message)


def _of_rank(paths: RunPaths, rank: int) -> object:
    # Files of rank 0's pod are at the top, files of other pods in folders with the pods' names.
    try:
        inside = gate.folders_in(paths.outputs, within=paths.root)
    except OSError as error:
        raise RunError(f"{paths.outputs} cannot be listed: {error.strerror}") from error
    others = [path for path in inside if path.name != RETURNED]
    folders = [paths.outputs, *others]
    for folder in folders:
        values = folder / RETURNED / f"rank-{rank}.json"
        if not is_there(values):
            continue
        try:
            tree = parse_json(read_bytes(values, paths.root))
            arrays = _arrays(values.with_suffix(".safetensors"), paths.root)
            return _value(tree, arrays)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = error or type(error).__name__
            raise RunError(f"{values} cannot be read: {why}") from error
    raise RunError(
        f"rank {rank} of {paths.root} returned nothing: "
        "it was no function, has not ended, or failed"
    )


def _arrays(file: Path, root: Path) -> Mapping[str, Any]:
    if not is_there(file):
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = read_bytes(file, root, _LARGEST)
    try:
        return dict(load(data))
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
