"""Deleting what we made in Kubernetes: one object, or what is left of a cluster whose keeper died."""

from __future__ import annotations

from typing import Any

from workbench.base.errors import BackendError
from workbench.pods.kubernetes.api import ApiRefusal, Kind, KubeApi

__all__ = ["delete", "remove"]

_GRACE_S = 2


def delete(api: KubeApi, thing: tuple[Kind, str, str]) -> str:
    """Delete an object; return why that failed, empty if it did not."""
    kind, name, uid = thing
    try:
        api.delete(kind, name, uid, grace_s=_GRACE_S if kind == "pod" else None)
    except ApiRefusal as error:
        return str(error)
    return ""


def remove(api: KubeApi, base: str, selector: str) -> None:
    """Delete all objects of a cluster."""
    pods, _ = api.list("pod", label_selector=selector)
    made: list[tuple[Kind, str, str]] = [("secret", base, ""), ("service", base, "")]
    for pod in pods:
        metadata: Any = pod["metadata"]
        made.append(("pod", metadata["name"], metadata["uid"]))
    if left := [words for thing in made if (words := delete(api, thing))]:
        raise BackendError("; ".join(left))
