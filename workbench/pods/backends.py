"""Make a backend from its JSON form. One entry for each place that pods can come from."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from workbench.base import entries
from workbench.base.errors import ConfigError, one_of
from workbench.pods.place import Place
from workbench.pods.pod import PodBackend

KINDS = tuple(entries.PLACES)
"""The words that `{"kind": …}` takes."""

CLASSES = {kind: name.rpartition(":")[2] for kind, name in entries.PLACES.items()}


def backend_class(kind: object) -> type[Place]:
    entry = next((entry for name, entry in entries.PLACES.items() if name == kind), None)
    if entry is None:
        raise one_of("backend kind", kind, KINDS)
    module, _, name = entry.partition(
        ":"
    )  # only the place that is used is imported: each takes some 20 ms
    return cast(type[Place], getattr(importlib.import_module(module), name))


def backend_from_dict(data: Mapping[str, object]) -> PodBackend:
    """Make the backend that `to_dict` described."""
    if "kind" not in data:
        raise ConfigError(
            f'a backend needs a kind, as in {{"kind": "local"}}; allowed: {", ".join(KINDS)}'
        )
    return cast(PodBackend, backend_class(data["kind"]).from_dict(data))


def remove_left(data: Mapping[str, object], directory: Path) -> None:
    """Remove what a keeper could not, for it was killed or the platform did not answer. Idempotent."""
    backend_from_dict(data).remove_left(directory)
