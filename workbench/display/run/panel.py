"""The live panel of a run; its own thread keeps it up to date on at most one twenty-fifth of a core."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.display.kit.doc import Note, blocks_html
from workbench.display.kit.live import Live, has_widgets
from workbench.display.kit.logs import fold, ranks_word
from workbench.display.kit.plots import CURVE_TITLES, curves_svg, warm
from workbench.display.kit.style import framed, styled
from workbench.display.kit.templates import Markup, macro
from workbench.display.run.buttons import Buttons
from workbench.display.run.facts import RunFacts, facts_of
from workbench.display.run.page import log_html, memory_html, part_html, run_doc
from workbench.rundir.status import state_or_problem
from workbench.rundir.view import RunView

if TYPE_CHECKING:
    from workbench.client.run import Run

__all__ = ["RunPanel", "run_bundle", "show_run"]

logger = logging.getLogger(__name__)
_TICK_S = 0.25
_SHARE = 0.03  # of a core for all, and the same for each plot: what it took decides when it is due again
_MOST_S = 2.0
_PLOT_SHARE = 0.01
_PLOT_AHEAD_S = 0.3  # some ten drawings: a short run's plots keep up with its figures
_PLOT_MOST_S = 0.1  # of what one drawing took is counted: the first may load the library
_PLOT_EVERY_S = {"curve": 1.0, "memory": 2.0}
_LOGS_S = 0.5
_ENDED_TICK_S = 2.0  # then only the cluster can still change
_LINES = 200
_FOLDED_LINES = 120  # of each rank
_TABS = 8
_ALL = "all ranks"


_LIVE = Live(run_doc)


def run_bundle(run: Run, *, live: bool | None = None) -> dict[str, object]:
    """Return a run as a display bundle: text and HTML always, the panel where it makes sense."""
    return _LIVE.bundle(run, _maker(run, live))


def show_run(run: Run, *, buttons: bool = False) -> None:
    """Display a run; its panel turns into plain HTML when the run has ended, unless its `buttons` are wanted."""
    live = has_widgets() if buttons else None
    _LIVE.show(run, _maker(run, live), keep=bool(live))


def _maker(run: Run, live: bool | None) -> Callable[[], RunPanel] | None:
    state, problem = state_or_problem(run.paths)
    wanted = not problem and (has_widgets() and not state.is_terminal if live is None else live)
    return (lambda: RunPanel(run, ended=lambda: _LIVE.settle(run))) if wanted else None


class RunPanel:
    """The widgets of one run; `widget` is what to display. It draws itself until closed or all is over."""

    def __init__(self, run: Run, ended: Callable[[], None] = lambda: None):
        import ipywidgets as w

        self.view = RunView(run.path)
        self._ended = ended
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._logs_due = 0.0
        self._drawn: dict[str, object] = {}
        self._rations = {name: _Ration(every_s) for name, every_s in _PLOT_EVERY_S.items()}
        self._parts = {name: w.HTML(layout=w.Layout(margin="0", width="auto")) for name in _PARTS}
        self._curve = w.Dropdown(
            options=[(title, name) for name, title in CURVE_TITLES.items()],
            value="loss",
            layout=w.Layout(width="170px"),
        )
        self._tabs = self._log_tabs(w)
        self.buttons = Buttons(run)
        self.widget = self._arranged(w)
        self._curve.observe(lambda _: self._at_once("curve"), "value")
        self._tabs.observe(lambda _: self._at_once("logs"), "value")
        self.draw(at_once=True)

    def start(self) -> RunPanel:
        """Begin to follow the run, unless that is done already; return this panel."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._loop, name=f"panel-{self.view.id}", daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop following; what is drawn stays. Idempotent."""
        self._closing.set()

    @property
    def over(self) -> bool:
        """Whether nothing more is to come: the run has ended, and its cluster too."""
        return self.view.state.is_terminal and self.view.cluster_phase in ("closed", "failed", "")

    @property
    def in_use(self) -> bool:
        """Whether stacks or TensorBoard are open in it."""
        return self.buttons.showing

    def draw(self, *, at_once: bool = False) -> None:
        """Read what is new and draw what has changed."""
        with self._lock:
            before = self.view.state
            self.view.refresh()
            at_once = at_once or self.view.state != before
            facts = facts_of(self.view)
            self._put("head", framed(self._head(facts), facts.state))
            self._put("figures", framed(part_html("figures", facts)))
            self._put("receipt", framed(part_html("receipt", facts), facts.state))
            self.buttons.update(facts)
            curve = str(self._curve.value)
            points = [len(self.view.curves[name]) for name in (curve, "eval_loss")]
            self._slow("curve", lambda: framed(curves_svg(self.view, curve)), (curve, *points), at_once)
            self._show_half("curve", any(map(len, self.view.curves.values())))
            samples = [len(host.gib) for host in self.view.memory.values()]
            memory = (samples, facts.memory, facts.state.is_terminal)
            self._slow("memory", lambda: framed(memory_html(self.view, facts)), memory, at_once)
            self._show_half("memory", bool(facts.memory))
            self._fit_tabs()
            self._draw_logs(at_once)

    @staticmethod
    def _head(facts: RunFacts) -> Markup:
        card = macro("run.html", "fault")(facts.card) if facts.card else Markup("")
        return part_html("head", facts) + part_html("bar", facts) + card

    def _loop(self) -> None:
        warm()
        settled = ""
        while not self._closing.is_set():
            began = time.thread_time()
            try:
                self.draw()
            except Exception:  # thread boundary: one failed drawing must not end the panel
                logger.exception("drawing the panel of %s", self.view.id)
            if self.view.state.is_terminal and settled != self.view.cluster_phase:
                settled = self.view.cluster_phase
                self._ended()
            if self.over:
                return
            least_s = _ENDED_TICK_S if self.view.state.is_terminal else _TICK_S
            self._closing.wait(max(least_s, min(_MOST_S, (time.thread_time() - began) / _SHARE)))

    def _put(self, name: str, content: str) -> None:
        if self._parts[name].value != content:
            self._parts[name].value = content

    def _slow(self, name: str, draw: Callable[[], str], state: object, at_once: bool) -> None:
        ration = self._rations[name]
        if state == self._drawn.get(name) or not (at_once or ration.allows()):
            return
        began = time.thread_time()
        self._put(name, draw())
        self._drawn[name] = state
        ration.spend(time.thread_time() - began)

    def _show_half(self, name: str, shown: bool) -> None:
        """Return a plot its half of the row only where there is something to see in it: a script has no curves."""
        display = "" if shown else "none"
        if self._halves[name].layout.display != display:
            self._halves[name].layout.display = display

    def _draw_logs(self, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now < self._logs_due:
            return
        self._logs_due = now + _LOGS_S
        world_size, chosen = self.view.world_size, self._tabs.value
        if chosen in self.view.ranks:
            lines = [("", line) for line in self.view.log(chosen).lines[-_LINES:]]
        else:
            logs = {rank: self.view.log(rank).lines[-_FOLDED_LINES:] for rank in self.view.ranks}
            state = (self.view.state.is_terminal, *(tuple(log) for log in logs.values()))
            if state == self._drawn.get("logs"):
                return
            self._drawn["logs"] = state
            lines = [(ranks_word(line.ranks, world_size), line.text) for line in fold(logs)[-_LINES:]]
        nothing = "printed nothing" if self.view.state.is_terminal else "nothing printed yet"
        self._put("logs", framed(log_html(lines) if lines else blocks_html([Note(nothing)])))

    def _at_once(self, name: str) -> None:
        with self._lock:
            self._logs_due = 0.0
            self._drawn.pop(name, None)
            if name in self._rations:
                self._rations[name] = _Ration(_PLOT_EVERY_S[name])
            self.draw()

    def _log_tabs(self, w: Any) -> Any:
        spec = self.view.spec
        expected = (spec.pods or spec.cluster.count) * spec.cluster.pods.slots if spec else 0
        options = _tabs_of(max(expected, self.view.world_size))
        if len(options) > _TABS + 1:
            return w.Dropdown(options=options, value=_ALL, layout=w.Layout(width="170px"))
        return w.ToggleButtons(options=options, value=_ALL, style={"button_width": "84px"})

    def _fit_tabs(self) -> None:
        options = _tabs_of(self.view.world_size)
        if self.view.world_size and len(options) != len(self._tabs.options):
            chosen = self._tabs.value
            self._tabs.options = options
            self._tabs.value = chosen if chosen in [value for _, value in options] else _ALL

    def _arranged(self, w: Any) -> Any:
        row = w.Layout(display="flex", flex_flow="row wrap", margin="0")
        half = {
            "flex": "1 1 340px",
            "max_width": "540px",
            "min_width": "0",
            "margin": "0 16px 0 0",
            "overflow": "hidden",
        }
        parts = self._parts
        self._halves = {
            "curve": w.VBox([self._curve, parts["curve"]], layout=w.Layout(**half)),
            "memory": w.VBox([parts["memory"]], layout=w.Layout(**half)),
        }
        plots = w.Box(list(self._halves.values()), layout=row)
        sheet = w.HTML(styled(""), layout=w.Layout(margin="0", height="0"))
        above = [sheet, parts["head"], self.buttons.widget, parts["figures"]]
        below = [parts["receipt"], self.buttons.extra, self._tabs, parts["logs"]]
        layout = w.Layout(max_width="1100px", overflow="hidden")
        return w.VBox([*above, plots, *below], layout=layout)


class _Ration:
    """What a plot may take: on average one hundredth of a core, some of it ahead, and never two soon after another."""

    def __init__(self, every_s: float):
        self._every_s = every_s
        self._left_s = _PLOT_AHEAD_S
        self._counted_at = time.monotonic()
        self._spent_at = float("-inf")

    def allows(self) -> bool:
        now = time.monotonic()
        self._left_s = min(_PLOT_AHEAD_S, self._left_s + (now - self._counted_at) * _PLOT_SHARE)
        self._counted_at = now
        return self._left_s > 0 and now >= self._spent_at + self._every_s

    def spend(self, took_s: float) -> None:
        self._left_s -= min(_PLOT_MOST_S, took_s)
        self._spent_at = time.monotonic()


def _tabs_of(world_size: int) -> list[tuple[str, object]]:
    return [(_ALL, _ALL), *((f"rank {rank}", rank) for rank in range(world_size))]


_PARTS = ("head", "figures", "curve", "memory", "receipt", "logs")
