"""Kueue's marks on the pods of a group, and the rule by which Kueue releases the pods. Pure.

Kueue keeps a finalizer on every pod of a group. A failed pod is released when a pod with another
name takes its place. All pods are released when each has succeeded, or when all have ended and one
is marked as final. Until then, the group's quota stays taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
COUNT_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
FINALIZER = "kueue.x-k8s.io/managed"
_FINAL_ANNOTATION = "kueue.x-k8s.io/retriable-in-group"

FINAL: dict[str, object] = {"metadata": {"annotations": {_FINAL_ANNOTATION: "false"}}}
"""The patch of a pod after which Kueue expects no replacement in the pod's group."""


def marks(queue: str, group: str, count: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations of a pod in a group; none without a queue."""
    if not queue:
        return {}, {}
    return {QUEUE_LABEL: queue, GROUP_LABEL: group}, {COUNT_ANNOTATION: str(count)}


def is_held(pod: Mapping[str, Any]) -> bool:
    """Return whether Kueue still keeps the pod in a group."""
    return FINALIZER in ((pod.get("metadata") or {}).get("finalizers") or ())
