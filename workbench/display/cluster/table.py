"""The table of a cluster's pods, from which text and HTML are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, gib
from workbench.pods.pod import Pod

__all__ = ["cluster_grid"]


_SHOWN_VERSIONS = ("python", "torch", "deepspeed", "transformers")


def cluster_grid(phase: str, message: str, pods: Sequence[Pod], memory_gib: Mapping[str, float] | None = None) -> Grid:
    """Make the table of the pods."""
    shown = [name for name in _SHOWN_VERSIONS if any(name in pod.versions for pod in pods)]
    notes = ["note"] if any(pod.message for pod in pods) else []
    memory = ["memory in use"] if memory_gib else []
    rows = [
        (
            pod.name, _where(pod), str(pod.slots), str(pod.phase),
            *(pod.versions.get(name, "") for name in shown),
            *([gib(used) if (used := (memory_gib or {}).get(pod.address)) else UNKNOWN] if memory else []),
            *([pod.message] if notes else []),
        )
        for pod in pods
    ]  # fmt: skip
    return Grid(
        columns=("pod", "address", "slots", "phase", *shown, *memory, *notes),
        rows=rows,
        right={"slots", *memory},
        caption=f"Cluster {phase}: {message}" if message else f"Cluster {phase}",
    )


def _where(pod: Pod) -> str:
    """Give address and port; the port of a forward is not the pod's, and is left out."""
    return f"{pod.address}:{pod.ssh_port}" if pod.address and not pod.ssh_address else pod.address
