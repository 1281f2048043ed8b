"""Deleting what we made in Kubernetes: one object, or what is left of a cluster whose keeper died."""

from __future__ import annotations

from typing import Any

from workbench.base.errors import BackendError
from workbench.pods.kubernetes.api import ApiRefusal, Kind, KubeApi

__all__ = ["delete", "made_for", "remove"]

_GRACE_S = 2


def delete(api: KubeApi, thing: tuple[Kind, str, str]) -> str:
    """Delete an object; return why that failed, empty if it did not."""
    kind, name, uid = thing
    try:
        api.delete(kind, name, uid, grace_s=_GRACE_S if kind == "pod" else None)
    except ApiRefusal as error:
        return str(error)
    return ""


def made_for(api: KubeApi, base: str, selector: str) -> list[tuple[Kind, str, str]]:
    """Return all objects of a cluster: kind, name and uid."""
    pods, _ = api.list("pod", label_selector=selector)
    made: list[tuple[Kind, str, str]] = [("secret", base, ""), ("service", base, "")]
    for pod in pods:
        metadata: Any = pod["metadata"]
        made.append(("pod", metadata["name"], metadata["uid"]))
    return made


def remove(api: KubeApi, base: str, selector: str) -> None:
    """Delete all objects of a cluster."""
    if left := [words for thing in made_for(api, base, selector) if (words := delete(api, thing))]:
        raise BackendError("; ".join(left))
