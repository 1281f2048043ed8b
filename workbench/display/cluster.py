"""A cluster for the eye: its phase and its pods."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.display.tables import Grid, html_table, text_table
from workbench.pods.pod import Pod

__all__ = ["cluster_html", "cluster_text"]


def cluster_text(phase: str, message: str, pods: Sequence[Pod]) -> str:
    """Draw the pods as text."""
    return text_table(_grid(phase, message, pods))


def cluster_html(phase: str, message: str, pods: Sequence[Pod]) -> str:
    """Draw the pods as HTML."""
    return html_table(_grid(phase, message, pods))


_SHOWN_VERSIONS = ("python", "torch", "deepspeed", "transformers")


def _grid(phase: str, message: str, pods: Sequence[Pod]) -> Grid:
    shown = [name for name in _SHOWN_VERSIONS if any(name in pod.versions for pod in pods)]
    notes = ["note"] if any(pod.message for pod in pods) else []
    rows = [
        (
            pod.name, f"{pod.address}:{pod.ssh_port}" if pod.address else "", str(pod.slots), str(pod.phase),
            *(pod.versions.get(name, "") for name in shown), *([pod.message] if notes else []),
        )
        for pod in pods
    ]  # fmt: skip
    return Grid(
        columns=("pod", "address", "slots", "phase", *shown, *notes),
        rows=rows,
        right={"slots"},
        caption=f"Cluster {phase}: {message}" if message else f"Cluster {phase}",
    )
