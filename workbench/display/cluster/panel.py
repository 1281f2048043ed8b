"""A cluster for the eye: its phase, its pods, their memory in use, what a start waits for, and a stop that asks once.

One record, `ClusterView`, is drawn as text, as HTML and as the live panel. The button calls `Cluster.close`.
"""

from __future__ import annotations

import html
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_json
from workbench.base.table import text_table
from workbench.base.words import plain
from workbench.display.cluster.table import cluster_grid
from workbench.display.kit.live import Live, has_widgets
from workbench.display.kit.style import framed, styled
from workbench.display.kit.table import html_table
from workbench.display.run.buttons import AskOnce
from workbench.pods.pod import Pod
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.view import RunView

if TYPE_CHECKING:
    from workbench.client.cluster import Cluster

__all__ = [
    "ClusterPanel", "ClusterView", "cluster_bundle", "cluster_html", "cluster_page", "cluster_text", "cluster_words",
    "look_at", "show_cluster",
]  # fmt: skip

logger = logging.getLogger(__name__)
_TICK_S = 1.0
_ENDED = ("closed", "failed", "lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterView:
    """What a cluster's panel states."""

    phase: str
    """starting, ready, closing, closed, failed or lost."""
    message: str
    """One line on that; of a start, what it waits for."""
    path: str
    """Its directory."""
    count: int
    """Pods that were asked for."""
    pods: Sequence[Pod] = ()
    """The pods as last seen; none before they have come."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory in use by the run in progress, GiB, by address."""
    running: str = ""
    """Id of the run in progress."""


def look_at(cluster: Cluster, known: dict[Path, RunView] | None = None) -> ClusterView:
    """See how a cluster stands, without asking its keeper."""
    run = _run_in_progress(cluster.path, {} if known is None else known)
    return ClusterView(
        phase=cluster.phase,
        message=cluster.message,
        path=str(cluster.path),
        count=int(str(read_json(ClusterPaths(cluster.path).config).get("count", 0))),
        pods=cluster.pods,
        memory={address: now for address, host in run.memory.items() if (now := host.gib.last)} if run else {},
        running=run.id if run else "",
    )


def _run_in_progress(path: Path, known: dict[Path, RunView]) -> RunView | None:
    for folder in (info.parent for info in path.glob("runs/*/run.json")):
        if not (folder / "result.json").exists():
            view = known.get(folder) or known.setdefault(folder, RunView(folder))
            view.refresh()
            if view.state in (RunState.STARTING, RunState.RUNNING):
                return view
    return None


def cluster_text(cluster: Cluster) -> str:
    """Draw how a cluster stands as text."""
    return cluster_words(look_at(cluster))


def cluster_html(cluster: Cluster) -> str:
    """Draw how a cluster stands as HTML."""
    return cluster_page(look_at(cluster))


def cluster_words(view: ClusterView) -> str:
    """Draw a cluster as text."""
    return "\n".join([text_table(cluster_grid(view.phase, view.message, view.pods, view.memory)), *_lines(view)])


def cluster_page(view: ClusterView) -> str:
    """Draw a cluster as HTML."""
    return styled(_content(view))


def cluster_bundle(cluster: Cluster) -> dict[str, object]:
    """Return a cluster as a display bundle: text and HTML always, the panel where there are widgets and it lives."""
    return _live(cluster).bundle(cluster.path, _maker(cluster))


def show_cluster(cluster: Cluster) -> None:
    """Display a cluster; its panel turns into plain HTML when the cluster has ended."""
    _live(cluster).show(cluster.path, _maker(cluster))


_lives: dict[Path, Live] = {}


def _live(cluster: Cluster) -> Live:
    def plain_bundle(_path: Path) -> dict[str, object]:
        view = look_at(cluster)
        return {"text/plain": cluster_words(view), "text/html": cluster_page(view)}

    return _lives.setdefault(cluster.path, Live(plain_bundle))


def _maker(cluster: Cluster) -> Callable[[], ClusterPanel] | None:
    if not has_widgets() or cluster.phase in _ENDED:
        return None
    return lambda: ClusterPanel(cluster, ended=lambda: _live(cluster).settle(cluster.path))


class ClusterPanel:
    """The widgets of one cluster; a thread keeps them up to date until the cluster has ended."""

    def __init__(self, cluster: Cluster, ended: Callable[[], None] = lambda: None):
        """Look at the cluster and build the widgets; `start` keeps them up to date."""
        import ipywidgets as w

        self._cluster, self._ended = cluster, ended
        self._known: dict[Path, RunView] = {}
        self._thread: threading.Thread | None = None
        self.over = False
        """Whether nothing more is to come."""
        self._closing = threading.Event()
        self._table, self._note = w.HTML(), w.HTML()
        self._sheet = w.HTML(styled(""), layout=w.Layout(margin="0", height="0"))
        self.stop = AskOnce(
            "Stop the cluster", "Really stop? A run in progress ends", self._close, icon="power-off",
            layout=w.Layout(width="auto"), tooltip="Ends the run in progress, then the pods; files stay",
        )  # fmt: skip
        """The button."""
        self.widget = w.VBox([self._sheet, self._table, w.HBox([self.stop.widget, self._note])])
        """The whole panel."""
        self.draw()

    def start(self) -> ClusterPanel:
        """Begin to follow the cluster; return this panel."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="cluster-panel", daemon=True)
            self._thread.start()
        return self

    @property
    def in_use(self) -> bool:
        """Whether there is something to read that plain HTML would take away."""
        return bool(self._note.value)

    def close(self) -> None:
        """Stop following; what is drawn stays."""
        self._closing.set()

    def draw(self) -> None:
        """Draw how it stands now."""
        view = look_at(self._cluster, self._known)
        drawn = framed(_content(view))
        if self._table.value != drawn:
            self._table.value = drawn
        ended = view.phase in _ENDED
        self.stop.widget.disabled = ended or view.phase == "closing"
        self.stop.calm()
        self.over = ended

    def _loop(self) -> None:
        while not self.over and not self._closing.wait(_TICK_S):
            try:
                self.draw()
            except Exception:  # a thread's border: one bad look must not end the panel
                logger.exception("drawing the panel of %s", self._cluster.path)
        if self.over:
            self._ended()

    def _close(self) -> None:
        threading.Thread(target=self._carry_out, name="cluster-stop", daemon=True).start()

    def _carry_out(self) -> None:
        try:
            self._cluster.close()
            self._note.value = ""
        except (WorkbenchError, OSError) as error:
            self._note.value = framed(f"<span class='wb-hint'>&nbsp;{html.escape(plain(str(error)))}</span>")


def _content(view: ClusterView) -> str:
    table = html_table(cluster_grid(view.phase, view.message, view.pods, view.memory))
    return table + "".join(f"<div class='wb-quiet'>{html.escape(line)}</div>" for line in _lines(view))


def _lines(view: ClusterView) -> list[str]:
    waits = "" if view.pods or view.phase != "starting" else f"{view.count} pods were asked for; none has come yet"
    running = f"Run in progress: {view.running}" if view.running else ""
    return [plain(line) for line in (waits, running, f"Directory: {view.path}") if line]
