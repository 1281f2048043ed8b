"""The buttons beside a run's picture; each calls a method of the `Run`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workbench.base.shown import as_html
from workbench.display.failure.stacks import stacks_blocks
from workbench.display.kit.buttons import Button, ButtonBar
from workbench.display.kit.doc import blocks_html
from workbench.display.kit.templates import styled
from workbench.display.run.facts import RunFacts

if TYPE_CHECKING:
    from workbench.client.run import Run

_STUCK = ("no step for", "no output and no CPU for", "the last step was", "rank ")  # how a stall's remark begins


class RunButtons(ButtonBar):
    def __init__(self, run: Run):
        super().__init__(
            "buttons of the run",
            {"stop": self._stop, "kill": self._kill, "stacks": self._show_stacks, "board": self._show_board},
        )
        self._run = run
        self._ended, self._asked = False, ""

    def update(self, facts: RunFacts) -> None:
        """Enable what makes sense now; offer the stacks where no step came for a while."""
        ended = facts.state.is_terminal
        if ended and not self._ended:
            self._ended = True
            self.say("")  # what was asked for has come to its end
        stuck = facts.hint.startswith(_STUCK) and not ended
        self._asked, stop, kill = _wording(facts.stop_grace_s)
        stacks = Button(
            name="stacks", text="No step for a while: see where every rank is" if stuck else "Stacks", urgent=stuck,
            tip="Where every rank is now: why is it stuck?",
        )  # fmt: skip
        live = [replace(button, disabled=ended) for button in (stop, kill, stacks)]
        self.draw([*live, Button(name="board", text="TensorBoard", tip="Opens TensorBoard of this run")])

    def _stop(self) -> None:
        self.say(self._asked)
        self._run.stop()

    def _kill(self) -> None:
        self.say("killing the run")
        self._run.cancel()

    def _show_stacks(self) -> None:
        self.say("asking every rank …")
        self.bring_up(styled(blocks_html(stacks_blocks(self._run.stacks()))))
        self.say("")

    def _show_board(self) -> None:
        self.say("starting TensorBoard …")
        self.bring_up(styled(as_html(self._run.tensorboard())))
        self.say("")


def _wording(stop_grace_s: float | None) -> tuple[str, Button, Button]:
    """Say what the buttons do: to a trainer, or to a script, whose ranks have so long to end."""
    asked, text = "asked to stop after a checkpoint", "Stop after a checkpoint"
    tip = (
        "Ends training after the step in progress; checkpoint and model are saved, and a later run can go on from there"
    )
    sure = "Really kill? Nothing is saved"
    if stop_grace_s is not None:
        asked, text, sure = (
            "asked every rank to stop",
            "Ask to stop",
            "Really kill? Only what it wrote by now comes back",
        )
        tip = (
            "Asks every rank, a Trainer to end after a step and others by a signal, and kills those that have not "
            f"ended {stop_grace_s:g} s later; what they wrote comes back"
        )
    kill = Button(name="kill", text="Kill", sure=sure, tip="Ends all ranks at once")
    return asked, Button(name="stop", text=text, tip=tip), kill
