"""Values that a function's ranks returned, read from JSON and safetensors, never from pickles."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.errors import RunError
from workbench.base.files import is_there, records
from workbench.base.files.gate import read_within
from workbench.base.json_values import Json, parse_json
from workbench.rundir.make.function import RETURNED
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
_LARGEST = 4 << 30  # bytes of a rank's arrays, all read into this process's memory


def returned(paths: RunPaths, ranks: int) -> list[object]:
    """Return the values of the ranks in their order; arrays and tensors as numpy arrays."""
    return [_of_rank(paths, rank) for rank in range(ranks)]


def raised_by(paths: RunPaths, rank: int | None) -> BaseException | None:
    """Return an exception of the type, text and causes that a function raised on a rank.

    None: the rank did not end with an exception. A type that is not known here has the name, and
    the first base that is known.
    """
    try:
        raised = _written(paths, f"rank-{rank}-raised.json")
        return None if raised is None else _exception(parse_json(read_within(raised, paths.root)))
    except Exception as error:  # any class may refuse to be made
        logger.info("the exception of rank %s cannot be made here: %s", rank, error)
        return None


def _exception(raised: Any) -> Any:
    (module, name), *_ = raised["types"]
    kinds = [_type_at(*place) for place in raised["types"]]
    kind = next(filter(None, kinds))
    text = str(raised["text"])
    args: list[Any] = [_value(each, {}) for each in raised["args"]]
    if raised["exceptions"]:
        args.append([_exception(each) for each in raised["exceptions"]])
    attributes = {each: _value(value, {}) for each, value in raised["attributes"].items()}
    made: Any = None
    if kind is kinds[0]:
        made = _made(kind, args, attributes)
    if made is None or _text_of(made) != text:  # the type is not known here, or holds more
        members = {"__str__": lambda _: text, "__module__": module}
        told = type(name.rpartition(".")[2], (kind,), members)
        made = _made(told, args if raised["exceptions"] else [text], attributes)
    if raised["before"] is not None:
        before = _exception(raised["before"])
        if raised["is_cause"]:
            made.__cause__ = before
        else:
            made.__context__ = before
    return made


def _made(kind: type[BaseException], args: Sequence[Any], attributes: Json) -> Any:
    """Make an exception by Python's own code: a pod chooses type and arguments.

    None: the arguments do not fit.
    """
    own = next(each for each in kind.__mro__ if vars(builtins).get(each.__name__) is each)
    with suppress(Exception):
        made = kind(*args) if kind is own else own.__new__(kind, *args)
        vars(made).update(attributes)
        return made
    return None


def _text_of(error: BaseException) -> str:
    with suppress(Exception):  # it may need what did not come
        return str(error)
    return ""


def _type_at(module: str, name: str) -> type[BaseException] | None:
    """Find a type by its place, in imported modules alone."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _written(paths: RunPaths, name: str) -> Path | None:
    """Find a file that a rank wrote. None: it wrote no such file."""
    # Files of rank 0's pod are at the top, files of other pods in folders with the pods' names.
    inside = records.folders_in(paths.outputs)
    folders = [paths.outputs, *(path for path in inside if path.name != RETURNED)]
    found = (folder / RETURNED / name for folder in folders)
    return next(filter(is_there, found), None)


def _of_rank(paths: RunPaths, rank: int) -> object:
    try:
        values = _written(paths, f"rank-{rank}.json")
    except OSError as error:
        raise RunError(f"{paths.outputs} cannot be listed: {error.strerror}") from error
    if values is not None:
        try:
            tree = parse_json(read_within(values, paths.root))
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

    data = read_within(file, root, _LARGEST)
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
