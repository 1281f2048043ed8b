"""Call a function of the notebook on a rank and write the returned value as plain data.

This file travels as the script of the run and imports nothing of this package. `function.json`
beside the file names the Python that pickled the function and holds the lines for tracebacks. The
trainer loads functions with this file too.
"""

from __future__ import annotations

import base64
import json
import linecache
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PLAIN = (str, bool, int, float, type(None))


def main() -> None:
    here = Path(__file__).absolute().parent
    facts = json.loads((here / "function.json").read_text(encoding="utf-8"))
    try:
        function, args, kwargs = load(facts, (here / "function.pickle").read_bytes())
        returned = function(*args, **kwargs)
    except Exception as error:
        with suppress(Exception):  # the traceback below says the same
            leave_raised(error, here / "returned", int(os.environ["RANK"]))
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(shown))
        sys.exit(1)
    try:
        leave(returned, here / "returned", int(os.environ["RANK"]))
    except (TypeError, ValueError) as error:
        sys.exit(f"{facts['name']} returned what cannot come back: {error}")


def load(facts: dict[str, Any], pickled: bytes | str) -> Any:
    """Return the unpickled object.

    The files in `facts` are importable during the unpickling. Text is base64.
    """
    mine = "{}.{}".format(*sys.version_info)
    if mine != facts["python"]:
        sys.exit(
            f"{facts['name']} was pickled by Python {facts['python']}, "
            f"and {os.uname().nodename} has {mine}, which cannot load "
            "it: choose pods with the notebook's Python, or send a file"
        )
    for name, source in facts["sources"].items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in facts.get("files", {}).items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            if isinstance(pickled, str):
                pickled = base64.b64decode(pickled)
            # Written by the notebook's own process, and sent over its pinned channel.
            return pickle.loads(pickled)
        finally:
            sys.path.remove(folder)


def leave(returned: object, folder: Path, rank: int) -> None:
    """Write a value as JSON, and its arrays as safetensors beside the JSON."""
    arrays: dict[str, Any] = {}
    tree = _tree(returned, "the value", arrays)
    folder.mkdir(exist_ok=True)
    if arrays:
        from safetensors.numpy import save_file

        save_file(arrays, folder / f"rank-{rank}.safetensors")
    (folder / f"rank-{rank}.json").write_text(json.dumps(tree), encoding="utf-8")


def leave_raised(error: BaseException, folder: Path, rank: int) -> None:
    """Write an exception as JSON beside the values of other ranks."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(_raised(error))
    (folder / f"rank-{rank}-raised.json").write_text(text, encoding="utf-8")


def _raised(error: BaseException) -> dict[str, Any]:
    """Return the types, text, plain arguments and attributes, and causes of an exception."""
    args = error.args
    inner: Sequence[BaseException] = ()
    if isinstance(error, BaseExceptionGroup):
        args = (error.message,)
        inner = error.exceptions
    elif type(error).__module__ == "builtins":
        args = error.__reduce__()[1]  # type: ignore[assignment]  # with an OSError's file
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "types": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__],
        "text": str(error),
        "args": [*_plain(dict(enumerate(args))).values()],
        "attributes": _plain(vars(error)),
        "exceptions": [_raised(each) for each in inner],
        "before": before and _raised(before),
        "is_cause": error.__cause__ is not None,
    }


def _plain(values: dict[Any, Any]) -> dict[Any, object]:
    """Return the trees of values, without values that are no plain data."""
    trees = {}
    for name, value in values.items():
        arrays: dict[str, Any] = {}
        with suppress(TypeError, ValueError, RecursionError):
            tree = _tree(value, "", arrays)
            if not arrays:
                trees[name] = tree
    return trees


def _tree(value: Any, where: str, arrays: dict[str, Any]) -> object:
    # Each container is an object of one key, so that an array's place cannot be mistaken for a
    # dict of the user's.
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        items = [_tree(item, f"{where}[{n}]", arrays) for n, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in _PLAIN:
                raise TypeError(f"{where} has a key of type {_name(key)}; use text or a number")
        pairs = []
        for key, item in value.items():
            pairs.append([key, _tree(item, f"{where}[{key!r}]", arrays)])
        return {"dict": pairs}
    # Arrays travel beside the tree, which keeps their names.
    array = _array(value)
    if array is None:
        raise TypeError(
            f"{where} is of type {_name(value)}; return numbers, "
            "text, lists, tuples, dicts, and arrays of numpy or torch"
        )
    if array.ndim == 0:
        return array.item()
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{where} is an array of {array.dtype}; return one of numbers")
    name = str(len(arrays))
    arrays[name] = array
    return {"array": name}


def _array(value: Any) -> Any:
    """Return a tensor or array as a numpy array on the CPU, or None for any other value."""
    torch = sys.modules.get("torch")
    numpy = sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        known = (torch.float16, torch.float32, torch.float64)
        if value.is_floating_point() and value.dtype not in known:
            value = value.float()  # numpy has no bf16; nothing is lost
        value = value.contiguous().numpy()
        import numpy
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return numpy.array(value, order="C")
    return None


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


if __name__ == "__main__":
    main()
