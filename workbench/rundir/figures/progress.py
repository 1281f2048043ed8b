"""`Progress`: how far a run is, worked out from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from workbench.rundir.events import Event
from workbench.rundir.state import RunState

__all__ = ["Progress", "ProgressMeter", "progress_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is. What is not known yet is None."""

    state: RunState
    """Where it is in its life."""
    message: str = ""
    """One line for people."""
    step: int | None = None
    """Optimizer steps taken."""
    max_steps: int | None = None
    """Steps in all."""
    epoch: float | None = None
    """Passes over the rows."""
    loss: float | None = None
    """Training loss at the last step."""
    eval_loss: float | None = None
    """Last loss on the evaluation rows."""
    samples_per_s: float | None = None
    """Rows a second, all ranks together."""
    eta_s: float | None = None
    """Seconds until the last step, at the pace so far."""


class ProgressMeter:
    """Work out the progress as events come in; of steps, the first and the last count for the pace."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._first: tuple[float, Mapping[str, object]] | None = None
        self._last: tuple[float, Mapping[str, object]] | None = None
        self._eval_loss: object = None

    def see(self, kind: str, time_s: float, data: Mapping[str, object]) -> None:
        """Take in the next event."""
        if kind == "step":
            self._last = (time_s, data)
            self._first = self._first or self._last
        elif kind == "eval":
            self._eval_loss = data.get("eval_loss")

    def progress(self, state: RunState, message: str) -> Progress:
        """Return how far it is by now."""
        data = self._last[1] if self._last else {}
        return Progress(
            state=state,
            message=message,
            step=_whole(data.get("step")),
            max_steps=_whole(data.get("max_steps")),
            epoch=_number(data.get("epoch")),
            loss=_number(data.get("loss")),
            eval_loss=_number(self._eval_loss),
            samples_per_s=_number(data.get("samples_per_s")),
            eta_s=None if state.is_terminal else self._eta_s(),
        )

    def _eta_s(self) -> float | None:
        if self._first is None or self._last is None:
            return None
        (began_s, first), (now_s, last) = self._first, self._last
        done, start, whole = (_whole(x) for x in (last.get("step"), first.get("step"), last.get("max_steps")))
        if done is None or start is None or whole is None or done <= start:
            return None
        return (now_s - began_s) / (done - start) * (whole - done)


def progress_of(state: RunState, message: str, events: Iterable[Event]) -> Progress:
    """Work out the progress from all events so far."""
    meter = ProgressMeter()
    for event in events:
        meter.see(event.kind, event.time_s, event.data)
    return meter.progress(state, message)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
