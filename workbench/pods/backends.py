"""Make a place from its JSON form. The places of this package are listed in `entries.PLACES`.

Another package adds a place by an entry point of the group `workbench.places`. The name of the
entry point is the place's kind.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from workbench.base import entries
from workbench.base.errors import ConfigError, one_of
from workbench.pods.place import Place

logger = logging.getLogger(__name__)

GROUP = "workbench.places"
"""The group of entry points by which another package adds a place."""

KINDS = tuple(entries.PLACES)
"""The kinds of this package's own places."""

CLASSES = {kind: name.rpartition(":")[2] for kind, name in entries.PLACES.items()}


def backend_class(kind: object) -> type[Place]:
    """Return the class of a kind. Only the module of this kind is imported, in about 20 ms."""
    # One of our own: no entry point can replace it.
    entry = next((entry for name, entry in entries.PLACES.items() if name == kind), None)
    if entry is not None:
        module, _, name = entry.partition(":")
        return cast(type[Place], getattr(importlib.import_module(module), name))
    # One of another package.
    added = _added()
    points = next((points for name, points in added.items() if name == kind), [])
    if not points:
        raise one_of("backend kind", kind, (*KINDS, *added))
    if len(points) > 1:
        raise ConfigError(
            f"backend kind {kind!r} is added by {len(points)} packages:"
            f" {', '.join(map(_origin, points))}; uninstall all but one"
        )
    return _load(points[0])


def backend_from_dict(data: Mapping[str, object]) -> Place:
    """Make the place that `to_dict` described."""
    if "kind" not in data:
        raise ConfigError(
            f'a backend needs a kind, as in {{"kind": "local"}}; allowed: {", ".join(KINDS)}'
        )
    return backend_class(data["kind"]).from_dict(data)


def check_registered(backend: Place) -> None:
    """Refuse a place without a kind known to the keeper, another process."""
    if backend.kind not in entries.PLACES and backend.kind not in _added():
        name = type(backend).__name__
        raise ConfigError(
            f"{name} has the kind {backend.kind!r}, and no installed package adds that kind. The"
            " keeper"
            f" would not find the place. Register {name} as an entry point of the group {GROUP}"
        )


def runs_here(kind: object) -> bool:
    """Return whether pods of a kind run on this machine.

    False for a kind without an installed package.
    """
    try:
        return backend_class(kind).on_this_machine
    except ConfigError:  # an old directory still opens without the package that it was made with
        return False


def has_queue(data: Mapping[str, object]) -> bool:
    """Return whether the pods of a place, in its JSON form, may wait in a queue for hours.

    False for a kind without an installed package.
    """
    try:
        return backend_from_dict(data).has_queue
    except ConfigError:
        return False


def remove_left(data: Mapping[str, object], directory: Path) -> None:
    """Remove the pods that a keeper left: after a kill, or a platform that was down. Idempotent."""
    backend_from_dict(data).remove_left(directory)


def _added() -> dict[str, list[EntryPoint]]:
    """Return the entry points of other packages' places, by kind."""
    added: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        if point.name in entries.PLACES:
            logger.warning(
                "the place %r of %s is not used: workbench has a place of that kind",
                point.name,
                _origin(point),
            )
        else:
            added.setdefault(point.name, []).append(point)
    return added


def _load(point: EntryPoint) -> type[Place]:
    try:
        found: object = point.load()
    except Exception as error:  # border: another package's code
        raise ConfigError(
            f"the place {point.name!r} of {_origin(point)} cannot be imported:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Place)):
        raise ConfigError(
            f"the entry point {point.name!r} of {_origin(point)} is {point.value}, not a"
            " subclass of workbench.pods.place.Place"
        )
    if found.kind != point.name:
        raise ConfigError(
            f"the entry point {point.name!r} of {_origin(point)} leads to {found.__name__}"
            f" of kind {found.kind!r}; the two names must be equal"
        )
    return found


def _origin(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else point.value
