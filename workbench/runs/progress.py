"""`Progress`: how far a run is, worked out from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.runs.events import Event
from workbench.runs.state import RunState

__all__ = ["Progress", "progress_of"]


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


def progress_of(state: RunState, message: str, events: Iterable[Event]) -> Progress:
    """Work out the progress from all events so far.

    Args:
        state: State of the run.
        message: The line that goes with it.
        events: The events, oldest first; of steps, the first and the last count for the pace.
    """
    first: Event | None = None
    last: Event | None = None
    eval_loss: object = None
    for event in events:
        if event.kind == "step":
            first, last = first or event, event
        elif event.kind == "eval":
            eval_loss = event.data.get("eval_loss")
    data = last.data if last else {}
    return Progress(
        state=state,
        message=message,
        step=_whole(data.get("step")),
        max_steps=_whole(data.get("max_steps")),
        epoch=_number(data.get("epoch")),
        loss=_number(data.get("loss")),
        eval_loss=_number(eval_loss),
        samples_per_s=_number(data.get("samples_per_s")),
        eta_s=None if state.is_terminal else _eta_s(first, last),
    )


def _eta_s(first: Event | None, last: Event | None) -> float | None:
    if first is None or last is None:
        return None
    done, start, whole = (
        _whole(x) for x in (last.data.get("step"), first.data.get("step"), last.data.get("max_steps"))
    )
    if done is None or start is None or whole is None or done <= start:
        return None
    return (last.time_s - first.time_s) / (done - start) * (whole - done)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
