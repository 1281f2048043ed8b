"""Find a job kind's classes for runs and results, from the kind in `spec.json`.

The `Traits` of a kind name the classes in `run_class` and `result_class`, as `module:Class`. If the
kind is unknown (the file is missing or damaged, or another package is not installed), the base
classes are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import get_object
from workbench.jobs.registry import DEFAULT, job_class, kinds
from workbench.rundir.paths import RunPaths

_T = TypeVar("_T")


class NotOfThisKind(RunError, AttributeError):
    """Report an attribute that a run or its result lacks, but runs of other kinds have."""


def kind_of(root: Path) -> str:
    """Return the job kind of a run directory, or "" if its specification cannot be read."""
    spec = read_json(RunPaths(root).spec)
    job = get_object(spec, "job")
    if not job:
        return ""
    return str(job.get("kind", DEFAULT))


def class_for(root: Path, member: str, base: type[_T]) -> type[_T]:
    """Return the class of a run's kind in a member of its `Traits`: `base` or a subclass.

    Raises:
        RunError: `base` belongs to another kind than the run.
    """
    kind = kind_of(root)
    try:
        named = str(getattr(job_class(kind).traits, member))
    except WorkbenchError:
        return base
    found = loaded(named)
    if isinstance(found, type) and issubclass(found, base):
        return found
    if isinstance(found, type) and issubclass(base, found):
        raise RunError(f"{root} is the run of a {kind} job; {base.__name__} does not read it")
    raise TypeError(f"{member} of job kind {kind!r} is {named}, which is no {base.__name__}")


def recipe_for(root: Path) -> Callable[[Any], Any] | None:
    """Return the function that writes the recipe of a run, by its job kind; None for no recipe."""
    try:
        named = job_class(kind_of(root)).traits.recipe
    except WorkbenchError:
        return None
    if not named:
        return None
    found = loaded(named)
    return found if callable(found) else None


def loaded(place: str) -> object:
    """Import an object by `module:name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def missing_attribute(root: Path, owner: str, member: str, name: str) -> AttributeError:
    """Return the error for a missing attribute of a run or result, with the kinds that have it."""
    kind = kind_of(root)
    if kind and _has(kind, member, name):  # the object was made by its class, not loaded
        return NotOfThisKind(
            f"{owner}(…) has no {name}; load the run instead: Run.load({str(root)!r})"
        )
    others = [each for each in kinds() if each != kind and _has(each, member, name)]
    if not others:
        text = f"{owner!r} object has no attribute {name!r}"
        if name == "status":
            # With the object in the error, Python would suggest `stacks`.
            return AttributeError(f"{text}. Use 'state'", name=name)
        return AttributeError(text)
    of = " or ".join(others)
    what = f"a {kind} job" if kind else "a job whose spec.json cannot be read"
    return NotOfThisKind(
        f"{root} is the run of {what} and has no {name}; runs of {of} jobs have it"
    )


def _has(kind: str, member: str, name: str) -> bool:
    try:
        named = str(getattr(job_class(kind).traits, member))
        return hasattr(loaded(named), name)
    except (WorkbenchError, ImportError, AttributeError):
        return False
