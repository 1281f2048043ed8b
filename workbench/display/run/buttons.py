"""The buttons below a run's panel; each calls a method of the `Run` in a thread, so that the notebook goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from workbench.base.shown import as_html
from workbench.display.kit.buttons import AskOnce, act_in_thread
from workbench.display.kit.doc import Code, Fold, Note, blocks_html
from workbench.display.kit.logs import clean, ranks_word
from workbench.display.kit.style import framed
from workbench.display.run.facts import RunFacts

if TYPE_CHECKING:
    from workbench.client.run import Run

__all__ = ["Buttons", "stacks_html"]

_STUCK = ("no step for", "no output and no CPU for", "the last step was", "rank ")  # how a stall's remark begins


class Buttons:
    """The row of buttons of a run, and the room below for what they bring up."""

    def __init__(self, run: Run):
        import ipywidgets as w

        self._run = run
        wide = {"layout": w.Layout(width="auto")}
        self._stop = w.Button(icon="pause", **wide)
        self._kill = AskOnce(
            "Kill", "", lambda: self._do("killing the run", run.cancel), icon="stop", tooltip="Ends all ranks at once",
            **wide,
        )  # fmt: skip
        self._asked = ""
        self._word(None)
        self._stacks = w.Button(
            description="Stacks", icon="bars", tooltip="Where every rank is now: why is it stuck?", **wide
        )
        self._board = w.Button(
            description="TensorBoard", icon="line-chart", tooltip="Opens TensorBoard of this run here", **wide
        )
        self._note = w.HTML(layout=w.Layout(margin="0 0 0 8px"))
        self._ended = False
        self.extra = w.HTML(layout=w.Layout(width="auto"))
        self._stop.on_click(lambda _: self._do(self._asked, run.stop))
        self._stacks.on_click(lambda _: self._do("", self._show_stacks))
        self._board.on_click(lambda _: self._do("", self._show_board))
        row = w.Layout(display="flex", flex_flow="row wrap", align_items="center")
        live = [self._stop, self._kill.widget, self._stacks, self._board, self._note]
        self.widget = w.Box(live, layout=row)

    @property
    def showing(self) -> bool:
        """Whether a button has brought something up that is still to be seen."""
        return bool(self.extra.value)

    def update(self, facts: RunFacts) -> None:
        """Enable what makes sense now; offer the stacks where no step came for a while."""
        ended = facts.state.is_terminal
        self._word(facts.stop_grace_s)
        if ended and not self._ended:
            self._ended = True
            self._say("")  # what was asked for has come to its end
        for button in (self._stop, self._kill.widget, self._stacks):
            if button.disabled != ended:
                button.disabled = ended
        stuck = facts.hint.startswith(_STUCK) and not ended
        text = "No step for a while: see where every rank is" if stuck else "Stacks"
        if self._stacks.description != text:
            self._stacks.description, self._stacks.button_style = text, "warning" if stuck else ""
        self._kill.calm()

    def _word(self, stop_grace_s: float | None) -> None:
        """Say on the buttons what they do: to a trainer, or to a script, whose ranks have so long to end."""
        if stop_grace_s is None:
            words = "Stop after a checkpoint", "asked to stop after a checkpoint", "Really kill? Nothing is saved"
            tip = "Ends training after the step in progress; the model is saved and brought back"
        else:
            words = "Ask to stop", "asked every rank to stop", "Really kill? Only what it wrote by now comes back"
            tip = (
                f"Asks every rank by a signal, and kills those that have not ended {stop_grace_s:g} s later; what they "
                "wrote comes back"
            )
        if self._stop.description != words[0]:
            self._stop.description, self._asked, self._kill.sure = words
            self._stop.tooltip = tip

    def _do(self, text: str, action: Callable[[], object]) -> None:
        self._say(text)
        act_in_thread(action, lambda words: self._say(words, bad=True), "panel-button")

    def _show_stacks(self) -> None:
        self._say("asking every rank …")
        self.extra.value = framed(stacks_html(self._run.stacks()))
        self._say("")

    def _show_board(self) -> None:
        self._say("starting TensorBoard …")
        self.extra.value = framed(as_html(self._run.tensorboard()))
        self._say("")

    def _say(self, text: str, *, bad: bool = False) -> None:
        self._note.value = framed(blocks_html([Note(text, "hint" if bad else "quiet")])) if text else ""


def stacks_html(stacks: Mapping[int, str]) -> str:
    """Draw the stacks of ranks; ranks that are at the same place share one."""
    places: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        places.setdefault(clean(text).strip() or "it did not answer", []).append(rank)
    blocks = [Fold(f"rank {ranks_word(ranks, 0)}", [Code(text)], open=True) for text, ranks in places.items()]
    return blocks_html(blocks or [Note("no rank answered")])
