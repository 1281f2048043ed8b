"""What the picture of a cluster shows at each look: its pods and their memory; its button calls `close`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from workbench.client.cluster import Cluster
from workbench.client.lifecycle import keep_from_idling
from workbench.display.cluster.view import cluster_doc, look_at
from workbench.display.kit.buttons import Button, ButtonBar
from workbench.display.kit.doc import Doc, to_bundle
from workbench.display.kit.line import ProgressLine, Screen
from workbench.display.kit.live import Watched, show_live
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.state import RunState
from workbench.rundir.totals import Progress
from workbench.rundir.view import RunView

_TICK_S = 1.0
_WORD_S = 60.0  # between two words to the keeper; sooner where it does not wait long for one
_ENDED = ("closed", "failed", "lost")
_PATIENCE_S = 0.3  # a start that is over by then needs no words
_DRAW_S = 0.25


def show_cluster(cluster: Cluster) -> None:
    """Display a cluster, and keep it up to date until it has ended."""
    show_live(cluster.path, lambda: ClusterPanel(cluster))


class ClusterPanel(Watched):
    """The look of one cluster, time and again; each look counts as use of it."""

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
            self._bar = ButtonBar("button of the cluster", {"stop": self._cluster.close})
            self._draw_bar()
        return self._bar

    def look(self, *, at_once: bool = False) -> Doc:  # noqa: ARG002  # nothing here could wait
        view = look_at(self._cluster, self._views)
        self._phase = view.phase
        if self._bar is not None:
            self._draw_bar()
        if not self.over and time.monotonic() - self._spoke_s >= self._word_s:
            self._spoke_s = time.monotonic()
            keep_from_idling(ClusterPaths(self._cluster.path))
        return cluster_doc(view)

    def _draw_bar(self) -> None:
        assert self._bar is not None
        stop = Button(
            name="stop", text="Stop the cluster", sure="Really stop? A run in progress ends",
            tip="Ends the run in progress, then the pods; files stay", disabled=self.over or self._phase == "closing",
        )  # fmt: skip
        self._bar.draw([stop])


@contextmanager
def follow_start(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Draw the pods as they come once a start takes long; in a terminal what it waits for. What is left is a line."""
    begun, drawn_at = time.monotonic(), float("-inf")
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
        screen.show({"text/plain": f"{cluster.message}, {time.monotonic() - begun:.1f} s after the start"})
