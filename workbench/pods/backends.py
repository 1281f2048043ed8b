"""Make a backend from its JSON form. One entry for each place that pods can come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from workbench.base.errors import ConfigError, one_of
from workbench.pods.cml.pods import CMLPods
from workbench.pods.hosts.pods import SSHPods
from workbench.pods.kubernetes.pods import KubernetesPods
from workbench.pods.local.pods import LocalPods
from workbench.pods.pod import PodBackend

__all__ = ["CLASSES", "KINDS", "backend_from_dict", "remove_left"]

_HOSTS = ("hosts", "hostfile", "user", "port", "key", "known_hosts", "trust", "jump", "ssh_config", "python", "root")
_OPTIONS: dict[str, tuple[Callable[..., PodBackend], tuple[str, ...]]] = {
    LocalPods.kind: (LocalPods, ("port",)),
    SSHPods.kind: (SSHPods, _HOSTS),
    CMLPods.kind: (CMLPods, ("cpu", "memory_gib", "nvidia_gpu", "port", "project", "root", "options")),
    KubernetesPods.kind: (KubernetesPods, tuple(option.name for option in fields(KubernetesPods))),
}

KINDS = tuple(_OPTIONS)
"""The words that `{"kind": …}` takes."""

CLASSES = {kind: make.__name__ for kind, (make, _) in _OPTIONS.items()}
"""The name of each kind's class, which `workbench` exports."""


def backend_from_dict(data: Mapping[str, object]) -> PodBackend:
    """Make the backend that `to_dict` described.

    Example:
        >>> backend_from_dict({"kind": "local", "port": 2222})
        LocalPods(port=2222)
    """
    if "kind" not in data:
        raise ConfigError(f'a backend needs a kind, as in {{"kind": "local"}}; allowed: {", ".join(KINDS)}')
    kind = str(data["kind"])
    if kind not in _OPTIONS:
        raise one_of("backend kind", data["kind"], KINDS)
    make, allowed = _OPTIONS[kind]
    options = {key: value for key, value in data.items() if key != "kind"}
    for key in options:
        if key not in allowed:
            raise one_of(f"option of the {kind} backend", key, allowed)
    return make(**options)


def remove_left(data: Mapping[str, object], directory: Path) -> None:
    """Remove what a keeper could not, for it was killed or the platform did not answer. Idempotent."""
    backend_from_dict(data).remove_left(directory)
