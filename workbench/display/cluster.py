"""The state of a cluster and its picture: phase, pods, memory in use, and progress of a start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from workbench.base.display_protocol import Draw
from workbench.base.files import read_json, records
from workbench.base.json_values import as_int
from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, gib, moment, percent, pluralize
from workbench.client.cluster import Cluster
from workbench.client.lifecycle import keep_from_idling
from workbench.display.kit.doc import Doc, Note, Table, to_bundle
from workbench.display.kit.equal import without_equal
from workbench.display.kit.line import ProgressLine, Screen
from workbench.display.kit.live import Watched, show_live
from workbench.display.kit.widgets import Button, ButtonBar
from workbench.pods.pod import Phase, Pod
from workbench.rundir.catalog.label import read_label
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.status import ClusterStatus, cluster_status, no_keeper, silence_of
from workbench.rundir.totals import Progress
from workbench.rundir.view import RunView

_LIFTED = ("slots", "run")
_SHOWN_VERSIONS = ("python", "torch", "deepspeed", "transformers")
_TICK_S = 1.0
_WORD_S = 60.0  # seconds between requests to the keeper; fewer with a short idle timeout
_NOT_STARTED = "not started"
_ENDED = ("closed", "failed", "lost")
_PATIENCE_S = 0.3  # a faster start shows no progress
_DRAW_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    phase: str
    """not started, starting, ready, closing, closed, failed or lost."""
    message: str
    """A line on the phase; during a start, the reason for waiting."""
    path: str
    count: int
    pods: Sequence[Pod] = ()
    """The pods at the last look; empty before their start."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory in use by the runs in progress, GiB, by address."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """CPU cores in use by the runs in progress, by address."""
    load: Mapping[str, float] = field(default_factory=dict)
    """Load of the pods' GPUs, 0 to 1, by address."""
    runs: Mapping[str, str] = field(default_factory=dict)
    """Name or id of the run in progress, by address."""
    idle_end: str = ""
    """Time of day of the automatic shutdown; empty if none is scheduled."""
    pods_end: str = ""
    """Time at which the platform ends the first pod in any case; empty if unknown."""


def look_at(cluster: Cluster, views: dict[Path, RunView] | None = None) -> ClusterView:
    """Return how a cluster is, without asking its keeper."""
    if no_keeper(RunPaths(cluster.path)):
        (only,) = cluster.runs
        message = cluster.message
        if not only.state.is_terminal:
            message = f"Run in progress: {only.id}; {message}"
        return ClusterView(
            phase=cluster.phase,
            message=message,
            path=str(cluster.path),
            count=cluster.spec.count,
        )
    runs = _runs_in_progress(cluster.path, {} if views is None else views)
    status = cluster_status(cluster.path)
    config = read_json(ClusterPaths(cluster.path).config)
    # An object whose `start` was never called has no files yet.
    if not config and status.phase == "starting" and status.pid is None:
        pods = pluralize(cluster.spec.count, "pod")
        return ClusterView(
            phase=_NOT_STARTED,
            message=f"cluster.start() starts {pods}",
            path=str(cluster.path),
            count=cluster.spec.count,
        )
    count = as_int(config.get("count")) or 0
    messages = [status.message, silence_of(cluster.path, status), _was_ready(status)]
    idle_end = ""
    if status.idle_end_s:
        idle_end = moment(status.idle_end_s, "%H:%M:%S")
    # The first pod that its platform ends is the end of the cluster.
    ends_s = [pod.ends_s for pod in status.pods if pod.ends_s is not None]
    is_over = status.phase in ("closed", "failed", "lost")
    # Memory is known only while a run reports samples.
    memory = {}
    cores = {}
    load = {}
    on_pod: dict[str, str] = {}
    for run in runs:
        name = read_label(run.paths).name or run.id
        on_pod |= {host.address: name for host in run.hosts}
        for address, host in run.memory.items():
            if host.gib.last:
                memory[address] = host.gib.last
            if host.cpu_cores is not None:
                cores[address] = host.cpu_cores
            if host.gpu_percent is not None:
                load[address] = host.gpu_percent / 100
    return ClusterView(
        phase=status.phase,
        message="; ".join(text for text in messages if text),
        idle_end=idle_end,
        pods_end=moment(min(ends_s), "%Y-%m-%d %H:%M") if ends_s and not is_over else "",
        path=str(cluster.path),
        count=count,
        pods=status.pods or _arriving(status, count),
        memory=memory,
        cores=cores,
        load=load,
        runs=on_pod,
    )


def _was_ready(status: ClusterStatus) -> str:
    """Say from when to when a closed cluster was ready: its picture replaces earlier pictures."""
    if status.phase not in ("closed", "failed") or not status.ready_s or not status.time_s:
        return ""
    began = moment(status.ready_s, "%Y-%m-%d %H:%M")
    ended = moment(status.time_s, "%Y-%m-%d %H:%M")
    if began[:10] == ended[:10]:  # the day is not repeated
        ended = ended[11:]
    return f"ready from {began} to {ended} with {pluralize(len(status.pods), 'pod')}"


def _arriving(status: ClusterStatus, count: int) -> Sequence[Pod]:
    """Return the running pods and the awaited pods of a start."""
    if status.phase != "starting" or not status.arrived:
        return ()
    here = {}
    for pod in status.arrived:
        here[pod.name] = replace(pod, phase=Phase.RUNNING) if pod.address else pod
    names = [f"pod-{number}" for number in range(count)]
    return [here.get(name) or Pod(name=name) for name in names]


def _runs_in_progress(path: Path, views: dict[Path, RunView]) -> list[RunView]:
    runs = []
    for folder in records.try_folders(path / "runs"):
        if not (folder / "run.json").is_file() or (folder / "result.json").exists():
            continue
        if folder not in views:
            views[folder] = RunView(folder)
        view = views[folder]
        view.refresh()
        if view.state in (RunState.STARTING, RunState.RUNNING):
            runs.append(view)
    return runs


def cluster_doc(view: ClusterView) -> Doc:
    grid = cluster_grid(view)
    grid, versions = without_equal(grid, _SHOWN_VERSIONS, least=1)
    grid, same = without_equal(grid, _LIFTED)
    lines = []
    if same:
        lines.append(f"On every pod: {', '.join(same)}")
    if versions:
        lines.append(f"Versions: {', '.join(versions)}")
    if view.phase == "starting" and not view.pods:
        lines.append(f"{view.count} pods were asked for; none has come yet")
    if view.idle_end:
        lines.append(
            f"Pods shut down at {view.idle_end} if idle. "
            "A run or an open cluster panel keeps them up."
        )
    if view.pods_end:
        lines.append(f"The platform ends the pods at {view.pods_end} in any case.")
    if view.phase != _NOT_STARTED:
        lines.append(f"Directory: {view.path}")
    return Doc(blocks=[Table(grid), *(Note(line) for line in lines)])


def cluster_grid(view: ClusterView) -> Grid:
    """Return a row per pod; the phase, its verdict, stays in sight."""
    phase = view.phase
    pods = view.pods
    shown = [name for name in _SHOWN_VERSIONS if any(name in pod.versions for pod in pods)]
    notes = ["note"] if any(pod.message for pod in pods) else []
    in_use = {
        "memory in use": {address: gib(used) for address, used in view.memory.items()},
        "cores in use": {address: f"{used:.1f}" for address, used in view.cores.items()},
        "GPU load": {address: percent(load) for address, load in view.load.items()},
        "run": view.runs,
    }
    in_use = {title: values for title, values in in_use.items() if values}
    rows = []
    for pod in pods:
        # The keeper's last look no longer holds for a closed cluster.
        is_stopped = phase == "closed" and not pod.phase.is_terminal
        row = [pod.name, "stopped" if is_stopped else str(pod.phase), _where(pod), str(pod.slots)]
        row += [values.get(pod.address, UNKNOWN) for values in in_use.values()]
        row += [pod.versions.get(name, "") for name in shown]
        if notes:
            row.append(pod.message)
        rows.append(row)
    return Grid(
        columns=("pod", "phase", "address", "slots", *in_use, *shown, *notes),
        rows=rows,
        right={"slots", "memory in use", "cores in use", "GPU load"},
        whole={"pod", "phase", "address"},
        caption=f"Cluster {phase}: {view.message}" if view.message else f"Cluster {phase}",
        stay=("pod", "phase"),
    )


def _where(pod: Pod) -> str:
    """Return address and port; the port of a forward is not the pod's, and is left out."""
    if pod.address and not pod.ssh_address:
        return f"{pod.address}:{pod.ssh_port}"
    return pod.address


def show_cluster(cluster: Cluster) -> None:
    """Display a cluster and keep the picture current until the cluster has ended."""
    show_live(cluster.path, lambda: ClusterPanel(cluster))


class ClusterPanel(Watched):
    """The live picture of a cluster; every look counts as use of the cluster."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._views: dict[Path, RunView] = {}
        self._bar: ButtonBar | None = None
        self._phase = ""
        self._spoke_s = float("-inf")

    @property
    def name(self) -> str:
        return f"cluster {self._cluster.path.name}"

    @property
    def over(self) -> bool:
        return self._phase in _ENDED

    @property
    def clickable(self) -> bool:
        return not self.over

    @property
    def tick_s(self) -> float:
        return min(_TICK_S, self._word_s)

    @property
    def _word_s(self) -> float:
        return min(_WORD_S, (self._cluster.spec.idle_timeout_s or _WORD_S) / 4)

    def bar(self) -> ButtonBar:
        if self._bar is None:
            actions = {"stop": self._cluster.close}
            self._bar = ButtonBar("button of the cluster", actions, self._buttons())
        return self._bar

    def look(self, *, at_once: bool = False) -> Doc:  # noqa: ARG002  # nothing here could wait
        view = look_at(self._cluster, self._views)
        self._phase = view.phase
        if self._bar is not None:
            self._bar.draw(self._buttons())
        if not self.over and time.monotonic() - self._spoke_s >= self._word_s:
            self._spoke_s = time.monotonic()
            keep_from_idling(ClusterPaths(self._cluster.path))
        return cluster_doc(view)

    def _buttons(self) -> list[Button]:
        stop = Button(
            name="stop",
            text="Stop the cluster",
            sure="Really stop? A run in progress ends",
            tip="Ends the run in progress, then the pods; files stay",
            disabled=self.over or self._phase in ("closing", _NOT_STARTED),
        )
        return [stop]


@contextmanager
def follow_start(cluster: Cluster) -> Iterator[Draw]:
    """Draw the pods during a long start; in a terminal, the reason for waiting. A line remains."""
    begun = time.monotonic()
    drawn_at = float("-inf")
    screen = Screen()

    def draw() -> None:
        nonlocal drawn_at
        now = time.monotonic()
        if now - begun <= _PATIENCE_S or now - drawn_at < _DRAW_S:
            return
        drawn_at = now
        if screen.is_notebook:
            screen.show(to_bundle(cluster_doc(look_at(cluster))))
        else:
            line.update(Progress(state=RunState.STARTING, message=cluster.message))

    with closing(ProgressLine()) as line:
        yield draw
    if screen.is_notebook and drawn_at > begun:
        took_s = time.monotonic() - begun
        screen.show({"text/plain": f"{cluster.message}, {took_s:.1f} s after the start"})
