"""The content of a run's picture and plots at every look; buttons call methods of the `Run`.

Slow drawings take at most a hundredth of a core.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from workbench.base.display_protocol import Draw, as_html
from workbench.client.plot import MEMORY, RunPlot
from workbench.display.kit.doc import Code, Doc, Figure, Note, blocks_html, to_bundle
from workbench.display.kit.line import follow_run, show_bundle
from workbench.display.kit.live import Watched, is_on_show, show_doc, show_live
from workbench.display.kit.plots.figure import Plot, plot_words
from workbench.display.kit.plots.runs import curve_plot, memory_plot, plot_title
from workbench.display.kit.plots.static import figure_svg, plot_svg, plots_png
from workbench.display.kit.templates import styled
from workbench.display.kit.widgets import Button, ButtonBar
from workbench.display.run.facts import OFFERS, RunFacts
from workbench.display.run.page import Drawing, RunPage, run_doc
from workbench.display.run.stacks import stacks_blocks
from workbench.rundir.figures.metrics import curves_of
from workbench.rundir.status import state_or_problem
from workbench.rundir.view import RunView

if TYPE_CHECKING:
    from workbench.client.run import Run


_TICK_S = 0.5
_PLOT_TICK_S = 2.0  # between looks of a single plot
_ENDED_TICK_S = 2.0  # after the end only the cluster can change
_PLOT_SHARE = 0.01  # share of a core per plot: the drawing time determines the next drawing
_PLOT_AHEAD_S = 0.3  # about ten drawings: plots of a short run are up to date
_PLOT_MOST_S = 0.1  # counted at most per drawing: the first may load the library
_PLOT_EVERY_S = 1.0
# Beginnings of a stall's hint.
_STUCK = ("no step for", "no output and no CPU for", "the last step was", "rank ")


def show_run(run: Run, *, buttons: bool = False, place: str = "") -> None:
    """Display a run and keep it current.

    Buttons vanish at the end, unless `buttons` are requested.
    """
    state, problem = state_or_problem(run.paths)
    if problem and state.is_terminal:  # an unknown state may be known at the next look
        show_bundle(to_bundle(run_doc(run)))
        return
    show_live(run.path, lambda: RunPanel(run), keep_bar=buttons, place=place)


def wait_for_run(run: Run) -> AbstractContextManager[Draw]:
    """Draw the progress of a run while someone waits for it; nothing beside the run's panel."""
    return nullcontext(lambda: None) if is_on_show(run.path) else follow_run(run)


def run_plot_doc(it: RunPlot) -> Doc:
    return PlotPanel(it).look(at_once=True)


def show_run_plot(it: RunPlot) -> None:
    """Display a plot of a run, and keep it up to date until the run has ended."""
    if RunView(it.path, ()).state.is_terminal:
        show_doc(run_plot_doc(it))
        return
    show_live((it.path, it.name, repr(it.options)), lambda: PlotPanel(it))


class PlotPanel(Watched):
    """A single plot of a run, drawn again as points arrive."""

    def __init__(self, it: RunPlot):
        self.view = RunView(it.path, curves_of(it.name), whole=it.options.needs_all)
        self._it = it
        self._drawings = Drawings()
        self._svg = ""
        self._doc = Doc(blocks=[])

    @property
    def name(self) -> str:
        return f"{self._it.name} of run {self.view.id}"

    @property
    def over(self) -> bool:
        return self.view.state.is_terminal

    @property
    def clickable(self) -> bool:
        return False

    @property
    def tick_s(self) -> float:
        return _PLOT_TICK_S

    def bar(self) -> ButtonBar:
        raise NotImplementedError("a plot has no buttons")

    def still(self) -> bytes:
        return plots_png([self._plot()])

    def look(self, *, at_once: bool) -> Doc:
        before = self.view.state
        self.view.refresh()
        plot = self._plot()
        options = self._it.options
        title = "memory of each pod" if self._it.name == MEMORY else plot_title(self._it.name)
        if not plot:
            what = MEMORY if self._it.name == MEMORY else title
            where = f" within{options.words[1:]}" if options.words else ""
            words = f"Run {self.view.id} has not logged two points of {what}{where} yet."
            return Doc(blocks=[Note(words)])
        # A new state is drawn at once, above all the end.
        svg = self._drawings.draw(
            "plot",
            plot,
            partial(plot_svg, plot),
            at_once=at_once or self.view.state != before,
        )
        # Until the next drawing, the words stay those of the last.
        if svg == self._svg:
            return self._doc
        self._svg = svg
        words = plot_words(replace(plot, notes=()))
        figure = Figure(svg, f"{title}, run {self.view.id}{options.words}", words, plot)
        self._doc = Doc(blocks=[figure, *(Note(text) for text in plot.notes)])
        return self._doc

    def _plot(self) -> Plot:
        if self._it.name == MEMORY:
            return memory_plot(self.view, self._it.options)
        return curve_plot(self.view, self._it.name, self._it.options)


class RunPanel(Watched):
    def __init__(self, run: Run):
        self.view = RunView(run.path)
        self._run = run
        self._bar: RunButtons | None = None
        self._drawings = Drawings()
        self._folds: dict[str, bool] = {}

    @property
    def name(self) -> str:
        return f"run {self.view.id}"

    @property
    def over(self) -> bool:
        """Whether nothing more is to come: the run has ended, and its cluster too."""
        return self.view.is_over

    @property
    def clickable(self) -> bool:
        return not self.view.state.is_terminal

    @property
    def keeps_buttons(self) -> bool:
        return self.view.state.is_terminal and bool(RunFacts(self.view).offers)

    @property
    def tick_s(self) -> float:
        return _TICK_S if self.clickable else _ENDED_TICK_S

    def bar(self) -> RunButtons:
        if self._bar is None:
            self._bar = RunButtons(self._run, RunFacts(self.view))
        return self._bar

    def unfold(self, title: str, is_open: bool) -> None:
        self._folds[title] = is_open

    def still(self) -> bytes:
        return plots_png([curve_plot(self.view), memory_plot(self.view)])

    def prepare(self) -> None:
        figure_svg(lambda axes: axes.plot([0, 1]), label="")

    def look(self, *, at_once: bool = False) -> Doc:
        before = self.view.state
        self.view.refresh()
        at_once = at_once or self.view.state != before
        draw = partial(self._drawings.draw, at_once=at_once)
        page = RunPage(self.view, draw, self._folds)
        if self._bar is not None:
            self._bar.update(page.facts)
        return page.doc()


class Drawings:
    """The last drawings of a run's plots.

    A plot is redrawn when its figures changed and it is due.
    """

    def __init__(self) -> None:
        self._plots: dict[str, _KeptPlot] = {}

    def draw(
        self,
        name: str,
        state: object,
        draw: Drawing,
        *,
        at_once: bool = False,
    ) -> str:
        kept = self._plots.setdefault(name, _KeptPlot())
        if state != kept.state and (at_once or not kept.drawn or kept.allows()):
            began = time.thread_time()
            kept.drawn = draw()
            kept.state = state
            kept.spend(time.thread_time() - began)
        return kept.drawn


@dataclass(slots=True)
class _KeptPlot:
    """A plot with a budget of one hundredth of a core on average, and a pause between drawings."""

    state: object = None
    drawn: str = ""
    left_s: float = _PLOT_AHEAD_S
    counted_at: float = field(default_factory=lambda: time.monotonic())
    drawn_at: float = float("-inf")

    def allows(self) -> bool:
        now = time.monotonic()
        earned_s = (now - self.counted_at) * _PLOT_SHARE
        self.left_s = min(_PLOT_AHEAD_S, self.left_s + earned_s)
        self.counted_at = now
        return self.left_s > 0 and now >= self.drawn_at + _PLOT_EVERY_S

    def spend(self, took_s: float) -> None:
        self.left_s -= min(_PLOT_MOST_S, took_s)
        self.drawn_at = time.monotonic()


class RunButtons(ButtonBar):
    def __init__(self, run: Run, facts: RunFacts):

        def draw_stacks() -> str:
            return blocks_html(stacks_blocks(run.stacks()))

        def draw_board() -> str:
            return as_html(run.tensorboard())

        actions = {
            "stop": self._stop,
            "kill": self._kill,
            "stacks": lambda: self._show("asking every rank …", draw_stacks, stacks=True),
            "board": lambda: self._show("starting TensorBoard …", draw_board),
        }
        # Where the page cannot put the code into a cell, the code is shown.
        for offer in OFFERS:
            actions[offer] = partial(self._show_code, offer)
        super().__init__("buttons of the run", actions, self._buttons(facts))
        self._run = run
        self._ended = False
        self._shows_stacks = False

    def update(self, facts: RunFacts) -> None:
        """Enable what makes sense now."""
        if facts.state.is_terminal and not self._ended:
            self._ended = True
            self.say("")  # the requested action has ended
            if self._shows_stacks:
                self.bring_up("")
        self.draw(self._buttons(facts))

    def _buttons(self, facts: RunFacts) -> list[Button]:
        """Return the buttons; the stacks are offered where no step came for a while."""
        ended = facts.state.is_terminal
        self._offers = facts.offers
        board = Button(name="board", text="TensorBoard", tip="Opens TensorBoard of this run")
        if ended:
            code = [
                Button(name=name, text=name, tip=f"Puts the code into a cell: {line}", cell=code)
                for name, (line, code) in facts.offers.items()
            ]
            return [*code, board]
        stuck = facts.hint.startswith(_STUCK)
        self._asked, stop, kill = _wording(facts.stop_grace_s)
        stacks = Button(
            name="stacks",
            text="No step for a while: see where every rank is" if stuck else "Stacks",
            urgent=stuck,
            tip="Where every rank is now: why is it stuck?",
        )
        return [stop, kill, stacks, board]

    def _show_code(self, offer: str) -> None:
        _, code = self._offers[offer]
        self.bring_up(styled(blocks_html([Code(code)])))

    def _stop(self) -> None:
        self.say(self._asked)
        self._run.stop()

    def _kill(self) -> None:
        self.say("killing the run")
        self._run.cancel()

    def _show(self, words: str, draw: Drawing, *, stacks: bool = False) -> None:
        self.say(words)
        self.bring_up(styled(draw()))
        self._shows_stacks = stacks
        self.say("")


def _wording(stop_grace_s: float | None) -> tuple[str, Button, Button]:
    """Return the buttons' texts for a trainer, or for a script with its grace period."""
    asked = "asked to stop after a checkpoint"
    text = "Stop after a checkpoint"
    sure = "Nothing is saved"
    tip = (
        "Ends training within two steps; checkpoint and model "
        "are saved, and a later run can continue from there"
    )
    if stop_grace_s is not None:
        asked = "asked every rank to stop"
        text = "Ask to stop"
        sure = "Only what it wrote by now comes back"
        tip = (
            "Asks every rank, a Trainer to end after a step and others by a signal, and kills "
            f"those that have not ended {stop_grace_s:g} s later; what they wrote comes back"
        )
    kill = Button(
        name="kill",
        text="Kill",
        sure=f"Really kill? {sure}",
        tip="Ends all ranks at once",
    )
    return asked, Button(name="stop", text=text, tip=tip), kill
