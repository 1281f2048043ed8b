"""Deleting pods that we made in Kubernetes. The Secret and the Service go with the first pod, which owns them."""

from __future__ import annotations

from typing import Any

from workbench.base.errors import BackendError
from workbench.pods.kubernetes.api import ApiRefusal, KubeApi

_GRACE_S = 2


def delete(api: KubeApi, pod: tuple[str, str]) -> str:
    """Delete a pod, by name and unique id; return why that failed, empty if it did not."""
    name, uid = pod
    try:
        api.delete("pod", name, uid, grace_s=_GRACE_S)
    except ApiRefusal as error:
        return str(error)
    return ""


def made_for(api: KubeApi, selector: str) -> list[tuple[str, str]]:
    """Return the pods of a cluster: name and unique id."""
    pods, _ = api.list("pod", label_selector=selector)
    names: list[Any] = [pod["metadata"] for pod in pods]
    return [(each["name"], each["uid"]) for each in names]


def remove(api: KubeApi, selector: str) -> None:
    if left := [words for pod in made_for(api, selector) if (words := delete(api, pod))]:
        raise BackendError("; ".join(left))
