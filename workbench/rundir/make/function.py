"""Write a notebook function as a script folder that calls the function.

No code on the notebook's machine ever reads a pickle.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import inspect
import io
import json
import linecache
import pickle
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from workbench.base import entries
from workbench.base.errors import ConfigError
from workbench.base.files import write_bytes
from workbench.base.files.folders import make_private
from workbench.jobs.job import Job
from workbench.jobs.script import Function, Script
from workbench.pods.pod import Pod

RETURNED = "returned"
"""Folder of the ranks' return values, relative to the script's folder."""
_LARGEST = 150 << 20  # bytes of a pickle; a script's folder may hold 200 MiB
_PYTHON = "{}.{}".format(*sys.version_info)
_LIBRARIES = ("site-packages", "dist-packages")


def as_script(job: Job | Function, parent: Path, pods: Iterable[Pod] = ()) -> Job:
    """Return a function as a script in its own folder below `parent`.

    Return other jobs unchanged.
    """
    if isinstance(job, Job):
        for name in job.rules.functions:
            _check_python(name, pods)
        return job
    _check_python(job.name, pods)
    pickled, facts = pickled_function(job)
    name = "".join(c for c in job.name if c.isidentifier()) or "function"
    digest = hashlib.sha256(pickled).hexdigest()
    folder = parent / f"{name}-{digest[:16]}"
    package, _, module = entries.CALL.rpartition(".")
    caller = files(package).joinpath(f"{module}.py")
    contents = {
        # No import can match the name: a function may be called `random`.
        f"{name}-call.py": caller.read_bytes(),
        "function.json": json.dumps(facts).encode(),
        "function.pickle": pickled,
        # Pods may lack cloudpickle or have another version.
        **cloudpickle_files(),
    }
    for path, content in contents.items():
        file = folder / path
        make_private(file.parent)
        write_bytes(file, content)
    return Script(
        path=str(folder / f"{name}-call.py"),
        launcher=job.launcher,
        stall_timeout_s=job.stall_timeout_s,
        restarts=job.restarts,
        env=job.env,
        requirements=job.requirements,
        outputs=[f"{RETURNED}/rank-*"],
    )


def _check_python(name: str, pods: Iterable[Pod]) -> None:
    for pod in pods:
        version = pod.versions.get("python", _PYTHON)
        if version.split(".")[:2] != _PYTHON.split("."):
            raise ConfigError(
                f"{name} would be pickled by Python {_PYTHON}, and Python {version} of {pod.name} "
                "cannot load the pickle: choose pods with the notebook's Python, or send a file"
            )


def cloudpickle_files() -> Mapping[str, bytes]:
    """Return the files of cloudpickle, by names relative to the script.

    Pods may lack the package.
    """
    contents = {}
    for file in files("cloudpickle").iterdir():
        if file.name.endswith(".py"):
            contents[f"cloudpickle/{file.name}"] = file.read_bytes()
    return contents


def pickled_function(job: Function) -> tuple[bytes, Mapping[str, object]]:
    """Return the pickle of a function with its arguments, and facts for the reader."""
    import cloudpickle

    if not callable(job.function):
        raise ConfigError(f"{job.function!r} is not a function")
    sources: dict[str, str] = {}
    whole = (job.function, tuple(job.args), dict(job.kwargs))
    module_name = getattr(job.function, "__module__", "")
    module = sys.modules.get(module_name)
    travels = _is_own(module)  # the module is sent too: pods have only libraries
    if travels:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = _dumps(whole, sources)
    except Exception as error:  # a class can raise any exception to refuse pickling
        raise ConfigError(f"{job.name} cannot be sent to the pods: {_culprit(job)}") from error
    finally:
        if travels:
            cloudpickle.unregister_pickle_by_value(module)
    if len(pickled) > _LARGEST:
        raise ConfigError(
            f"{job.name} and all used data are {len(pickled) >> 20} MiB as a pickle; "
            f"the limit is {_LARGEST >> 20} MiB: "
            "give data by path or hub id, and load the data in the function"
        )
    return pickled, {"name": job.name, "python": _PYTHON, "sources": sources}


def _dumps(value: object, sources: dict[str, str]) -> bytes:
    """Pickle by value with cell names as file names of code, and store the lines of every file."""
    import cloudpickle

    def code(it: CodeType) -> Any:
        name = _cell(it.co_filename)
        lines = linecache.getlines(it.co_filename)
        if lines:
            kept = sources.get(name, "")
            sources[name] = _with_lines(kept, lines, it)
        return table[CodeType](it.replace(co_filename=name))

    def refuse(file: io.TextIOWrapper) -> Any:  # cloudpickle would send the file's content
        if file not in (sys.stdout, sys.stderr):
            raise pickle.PicklingError("cannot pickle an open file")
        return table[io.TextIOWrapper](file)

    table = cloudpickle.Pickler.dispatch_table

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: code, io.TextIOWrapper: refuse}, table)

    target = io.BytesIO()
    Pickler(target).dump(value)
    return target.getvalue()


def _with_lines(kept: str, lines: Sequence[str], code: CodeType) -> str:
    """Return a file's text with only the lines of `code` and the lines in `kept`.

    All other lines are empty.
    """
    # Tracebacks need the lines. The rest of a cell may hold secrets, such as a token.
    first = code.co_firstlineno
    last = first
    for _, end, _, _ in code.co_positions():
        if end is not None:
            last = max(last, end)
    text = kept.splitlines(keepends=True)
    missing = last - len(text)
    text += ["\n"] * missing
    text[first - 1 : last] = lines[first - 1 : last]
    return "".join(text)


def _cell(file: str) -> str:
    """Return the name of a file in tracebacks: `<cell 3>` for the notebook's third cell."""
    main = sys.modules["__main__"]
    get_ipython = getattr(main, "get_ipython", getattr(builtins, "get_ipython", None))
    shell = get_ipython() if get_ipython else None
    compiler = getattr(shell, "compile", None)
    numbers = getattr(compiler, "_filename_map", {})
    number = numbers.get(file)
    if number is None:
        return file
    return f"<cell {number}>"


def _is_own(module: ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":
        return False
    file = Path(getattr(module, "__file__", None) or "")
    library = Path(importlib.__file__ or "").parent.parent
    if not file.name or file.is_relative_to(library):
        return False
    return set(file.parts).isdisjoint(_LIBRARIES)


def _culprit(job: Function) -> str:
    """Return the variable or argument that cannot be pickled, and the reason."""
    named: dict[str, object] = {}
    for number, value in enumerate(job.args, start=1):
        named[f"argument {number}"] = value
    for name, value in job.kwargs.items():
        named[f"argument {name!r}"] = value
    named |= _variables(job.function, job.name, set())
    for name, value in named.items():
        try:
            _dumps(value, {})
        except Exception as error:
            return (
                f"{name}, of type {type(value).__qualname__}, cannot "
                f"travel ({error}); make it inside the function"
            )
    return "see the error above"


def _variables(function: object, name: str, seen: set[int]) -> Mapping[str, object]:
    """Return the notebook's variables in use by a function.

    Variables of called functions come first.
    """
    if not isinstance(function, FunctionType) or id(function) in seen:
        return {}
    seen.add(id(function))
    used = inspect.getclosurevars(function)
    direct = {**used.globals, **used.nonlocals}
    found: dict[str, object] = {}
    for variable, value in direct.items():
        found |= _variables(value, variable, seen)
    for variable, value in direct.items():
        found[f"the variable {variable!r} in {name}"] = value
    return found
