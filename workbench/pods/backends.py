"""Make a backend from its JSON form. One entry for each place that pods can come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from workbench.base.errors import ConfigError
from workbench.base.record import read_kind
from workbench.pods.cml.pods import CMLPods
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.local.pods import LocalPods
from workbench.pods.place import Place
from workbench.pods.pod import PodBackend

__all__ = ["CLASSES", "KINDS", "backend_from_dict", "remove_left"]

_PLACES: Sequence[type[Place]] = (LocalPods, SSHPods, CMLPods, KubernetesPods)

KINDS = tuple(place.kind for place in _PLACES)
"""The words that `{"kind": …}` takes."""

CLASSES = {place.kind: place.__name__ for place in _PLACES}


def backend_from_dict(data: Mapping[str, object]) -> PodBackend:
    """Make the backend that `to_dict` described."""
    if "kind" not in data:
        raise ConfigError(f'a backend needs a kind, as in {{"kind": "local"}}; allowed: {", ".join(KINDS)}')
    return cast(PodBackend, read_kind("backend", data, _PLACES))


def remove_left(data: Mapping[str, object], directory: Path) -> None:
    """Remove what a keeper could not, for it was killed or the platform did not answer. Idempotent."""
    backend_from_dict(data).remove_left(directory)
