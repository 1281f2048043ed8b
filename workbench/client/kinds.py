"""Find the classes that a kind of job names for its runs and for their results, by what `spec.json` says.

A job names them in its class variables `run_class` and `result_class`, as `module:Class`. Where the kind cannot be
known (the file is missing or damaged, another package is not installed), a run has what every run has.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import part
from workbench.jobs.registry import DEFAULT, job_class, kinds
from workbench.rundir.paths import RunPaths

_T = TypeVar("_T")


class NotOfThisKind(RunError, AttributeError):
    """Report that a run, or its result, lacks an attribute that runs of other kinds have."""


def kind_of(root: Path) -> str:
    """Return the kind of the job of a run directory; empty where its specification cannot be read."""
    job = part(read_json(RunPaths(root).spec), "job")
    return str(job.get("kind", DEFAULT)) if job else ""


def class_for(root: Path, member: str, base: type[_T]) -> type[_T]:
    """Return the class, `base` or one below it, that the kind of a run names in a class variable of its job.

    Raises:
        RunError: `base` belongs to another kind than the run.
    """
    kind = kind_of(root)
    try:
        named = str(getattr(job_class(kind), member))
    except WorkbenchError:
        return base
    found = loaded(named)
    if isinstance(found, type) and issubclass(found, base):
        return found
    if isinstance(found, type) and issubclass(base, found):
        raise RunError(f"{root} is the run of a {kind} job; {base.__name__} does not read it")
    raise TypeError(f"{member} of job kind {kind!r} is {named}, which is no {base.__name__}")


def recipe_for(root: Path) -> Callable[[Any], Any] | None:
    """Return the function that writes how to repeat the run of a result, by the kind of its job; None for no recipe."""
    try:
        named = job_class(kind_of(root)).recipe
    except WorkbenchError:
        return None
    found = loaded(named) if named else None
    return found if callable(found) else None


def loaded(place: str) -> object:
    """Import what `module:name` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def missing_attribute(root: Path, owner: str, member: str, name: str) -> AttributeError:
    """Return the error for an attribute that a run or its result lacks; it names the kinds that have it."""
    kind = kind_of(root)
    if kind and _has(kind, member, name):  # the object was made by its class, not loaded
        return NotOfThisKind(
            f"{owner}(…) has no {name}; load the run instead: Run.load({str(root)!r})"
        )
    others = [each for each in kinds() if each != kind and _has(each, member, name)]
    if not others:
        return AttributeError(f"{owner!r} object has no attribute {name!r}")
    of = " or ".join(others)
    what = f"a {kind} job" if kind else "a job whose spec.json cannot be read"
    return NotOfThisKind(
        f"{root} is the run of {what} and has no {name}; runs of {of} jobs have it"
    )


def _has(kind: str, member: str, name: str) -> bool:
    try:
        return hasattr(loaded(str(getattr(job_class(kind), member))), name)
    except (WorkbenchError, ImportError, AttributeError):
        return False
