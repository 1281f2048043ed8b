"""The live panel of a cluster: its pods and their memory, and a stop that asks once. The button calls `close`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workbench.client.cluster import Cluster
from workbench.client.lifecycle import keep_from_idling
from workbench.display.cluster.view import cluster_doc, look_at
from workbench.display.kit.buttons import AskOnce, act_in_thread
from workbench.display.kit.doc import Note, blocks_html, to_fragment
from workbench.display.kit.live import Live, has_widgets
from workbench.display.kit.style import framed, styled
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.view import RunView

__all__ = ["ClusterPanel", "cluster_bundle", "show_cluster"]

logger = logging.getLogger(__name__)
_TICK_S = 1.0
_WORD_S = 60.0  # between two words to the keeper; sooner where it does not wait long for one
_ENDED = ("closed", "failed", "lost")


def cluster_bundle(cluster: Cluster) -> dict[str, object]:
    """Return a cluster as a display bundle: text and HTML always, the panel where there are widgets and it lives."""
    return _LIVE.bundle(cluster, _maker(cluster))


def show_cluster(cluster: Cluster) -> None:
    """Display a cluster; its panel turns into plain HTML when the cluster has ended."""
    _LIVE.show(cluster, _maker(cluster))


_LIVE = Live(lambda cluster: cluster_doc(look_at(cluster)))


def _maker(cluster: Cluster) -> Callable[[], ClusterPanel] | None:
    if not has_widgets() or cluster.phase in _ENDED:
        return None
    return lambda: ClusterPanel(cluster, ended=lambda: _LIVE.settle(cluster))


class ClusterPanel:
    """The widgets of one cluster; a thread keeps them up to date until the cluster has ended."""

    def __init__(self, cluster: Cluster, ended: Callable[[], None] = lambda: None):
        import ipywidgets as w

        self._cluster, self._ended = cluster, ended
        self._views: dict[Path, RunView] = {}
        self._thread: threading.Thread | None = None
        self.over = False
        self._closing = threading.Event()
        self._table, self._note = w.HTML(), w.HTML()
        self._sheet = w.HTML(styled(""), layout=w.Layout(margin="0", height="0"))
        self.stop = AskOnce(
            "Stop the cluster", "Really stop? A run in progress ends", self._close, icon="power-off",
            layout=w.Layout(width="auto"), tooltip="Ends the run in progress, then the pods; files stay",
        )  # fmt: skip
        self.widget = w.VBox([self._sheet, self._table, w.HBox([self.stop.widget, self._note])])
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
        """Draw how it is now."""
        view = look_at(self._cluster, self._views)
        drawn = to_fragment(cluster_doc(view))
        if self._table.value != drawn:
            self._table.value = drawn
        ended = view.phase in _ENDED
        self.stop.widget.disabled = ended or view.phase == "closing"
        self.stop.calm()
        self.over = ended

    def _loop(self) -> None:
        word_s, spoke_s = min(_WORD_S, (self._cluster.spec.idle_timeout_s or _WORD_S) / 4), 0.0
        while not self.over and not self._closing.wait(min(_TICK_S, word_s)):
            try:
                self.draw()
                if time.monotonic() - spoke_s >= word_s:
                    spoke_s = time.monotonic()
                    keep_from_idling(ClusterPaths(self._cluster.path))
            except Exception:  # thread boundary: one failed drawing must not end the panel
                logger.exception("drawing the panel of %s", self._cluster.path)
        if self.over:
            self._ended()

    def _close(self) -> None:
        act_in_thread(self._close_cluster, self._show, "cluster-stop")

    def _close_cluster(self) -> None:
        self._cluster.close()
        self._note.value = ""

    def _show(self, words: str) -> None:
        self._note.value = framed(blocks_html([Note(words, "hint")]))
