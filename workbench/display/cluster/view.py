"""How a cluster is: its phase, its pods, their memory in use, and what a start waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, gib
from workbench.client.cluster import Cluster
from workbench.display.kit.doc import Doc, Note, Table
from workbench.pods.pod import Phase, Pod
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import ClusterStatus, cluster_status
from workbench.rundir.view import RunView

_SHOWN_VERSIONS = ("python", "torch", "deepspeed", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    phase: str
    """starting, ready, closing, closed, failed or lost."""
    message: str
    """One line on that; of a start, what it waits for."""
    path: str
    count: int
    pods: Sequence[Pod] = ()
    """The pods as last seen; none before they have come."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory in use by the run in progress, GiB, by address."""
    running: str = ""
    """Id of the run in progress."""
    idle_end: str = ""
    """The time of day when it closes if nobody uses it; empty where that is not to come."""


def look_at(cluster: Cluster, views: dict[Path, RunView] | None = None) -> ClusterView:
    """Return how a cluster is, without asking its keeper."""
    run = _run_in_progress(cluster.path, {} if views is None else views)
    status = cluster_status(cluster.path)
    count = int(str(read_json(ClusterPaths(cluster.path).config).get("count", 0)))
    return ClusterView(
        phase=status.phase,
        message=status.message,
        idle_end=time.strftime("%H:%M:%S", time.localtime(end_s)) if (end_s := status.idle_end_s) else "",
        path=str(cluster.path),
        count=count,
        pods=status.pods or _arriving(status, count),
        memory={address: now for address, host in run.memory.items() if (now := host.gib.last)} if run else {},
        running=run.id if run else "",
    )


def _arriving(status: ClusterStatus, count: int) -> Sequence[Pod]:
    """Return the pods that are up by now, and those that the start still waits for."""
    if status.phase != "starting" or not status.arrived:
        return ()
    here = {pod.name: replace(pod, phase=Phase.RUNNING) if pod.address else pod for pod in status.arrived}
    return [here.get(name) or Pod(name=name) for name in (f"pod-{number}" for number in range(count))]


def _run_in_progress(path: Path, views: dict[Path, RunView]) -> RunView | None:
    for folder in (info.parent for info in path.glob("runs/*/run.json")):
        if not (folder / "result.json").exists():
            view = views.get(folder) or views.setdefault(folder, RunView(folder))
            view.refresh()
            if view.state in (RunState.STARTING, RunState.RUNNING):
                return view
    return None


def cluster_doc(view: ClusterView) -> Doc:
    grid = cluster_grid(view.phase, view.message, view.pods, view.memory)
    waits = "" if view.pods or view.phase != "starting" else f"{view.count} pods were asked for; none has come yet"
    running = f"Run in progress: {view.running}" if view.running else ""
    idle = f"Its pods stop at {view.idle_end} unless a run or a notebook that shows this panel uses them before"
    lines = [line for line in (waits, running, idle if view.idle_end else "", f"Directory: {view.path}") if line]
    return Doc(blocks=[Table(grid), *map(Note, lines)])


def cluster_grid(phase: str, message: str, pods: Sequence[Pod], memory_gib: Mapping[str, float] | None = None) -> Grid:
    shown = [name for name in _SHOWN_VERSIONS if any(name in pod.versions for pod in pods)]
    notes = ["note"] if any(pod.message for pod in pods) else []
    memory = ["memory in use"] if memory_gib else []
    rows = [
        (
            pod.name, _where(pod), str(pod.slots), _phase_of(pod, phase),
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
        whole={"pod", "phase"},
        caption=f"Cluster {phase}: {message}" if message else f"Cluster {phase}",
    )


def _phase_of(pod: Pod, cluster: str) -> str:
    """Return the phase of a pod; what the keeper saw last is no more true of a cluster that is closed."""
    return "stopped" if cluster == "closed" and not pod.phase.is_terminal else str(pod.phase)


def _where(pod: Pod) -> str:
    """Return address and port; the port of a forward is not the pod's, and is left out."""
    return f"{pod.address}:{pod.ssh_port}" if pod.address and not pod.ssh_address else pod.address
