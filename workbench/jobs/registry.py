"""Find the class of a job by its kind.

Another package adds a kind by an entry point of the group `workbench.jobs`. Its `pyproject.toml`
then has, for the class `Recipe` of the module `mine.recipe` with kind `recipe`:

    [project.entry-points."workbench.jobs"]
    recipe = "mine.recipe:Recipe"
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import entry_points

from workbench.base import entries
from workbench.base.errors import ConfigError, one_of
from workbench.jobs.job import Job
from workbench.jobs.views import JobViews

GROUP = "workbench.jobs"
"""Group of the entry points of other packages."""
DEFAULT = "finetune"
"""Kind of a job whose JSON names none."""


def kinds() -> Mapping[str, str]:
    """Return `module:Class` by kind.

    Built-in kinds take precedence over those of other packages.
    """
    return {**_added(tuple(_changed_ns(place) for place in sys.path)), **entries.JOBS}


@lru_cache(maxsize=1)
def _added(_state: tuple[tuple[str, int], ...]) -> Mapping[str, str]:
    """Read the metadata of every installed package, again only after a change.

    A table of 100 runs of a kind that is not installed here would read the metadata 100 times.
    """
    return {each.name: each.value for each in entry_points(group=GROUP)}


def _changed_ns(place: str) -> tuple[str, int]:
    try:
        return place, os.stat(place or ".").st_mtime_ns  # noqa: PTH116  # sys.path has texts
    except OSError:
        return place, 0


def job_class(kind: object) -> type[Job]:
    """Import the class of a kind.

    Raises:
        ConfigError: The kind is unknown (the message names all kinds), or its package cannot be
            imported.
    """
    if not isinstance(kind, str):
        raise one_of("job kind", kind, kinds())
    if kind in entries.JOBS:
        return _loaded(kind, entries.JOBS[kind])
    others = kinds()
    if kind not in others:
        raise one_of("job kind", kind, others)
    return _loaded(kind, others[kind])


def job_from_dict(data: Mapping[str, object]) -> Job:
    """Read the JSON form of a job of any kind."""
    return job_class(data.get("kind", DEFAULT)).from_dict(data)


def table_columns(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the cells of a job in tables, from the job's JSON form.

    A job of an unknown kind has the cells that any job may have.
    """
    try:
        views = job_class(data.get("kind", DEFAULT)).traits.views_class
    except ConfigError:
        views = JobViews
    return views.table_columns(data)


@cache
def _loaded(kind: str, place: str) -> type[Job]:
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"job kind {kind!r} cannot be loaded from "
            f"{place}: {error}. Install or repair its package"
        ) from error
    if isinstance(found, type) and issubclass(found, Job) and found.kind == kind:
        return found
    raise ConfigError(
        f"job kind {kind!r} is registered as {place}, but {place} is no Job of kind {kind!r}; "
        "correct the entry point"
    )
