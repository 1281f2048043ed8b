"""`RunTotals`: what the events of a run come to, taken in one by one: the one place that knows the kinds.

It is pure. `TotalsTail` reads the events from a file as they come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self

from workbench.base.json_values import number, numbers_of, whole
from workbench.rundir.events import Event, EventKind, EventTail
from workbench.rundir.figures.workers import WorkerBook
from workbench.rundir.result import Restart
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)
_MOST_NOTES = 20
_CAUSAL = (
    "causal"  # family of a model whose loss is that of the next token, so that it has a perplexity
)
_MOST_NATS = 700  # e to it is near the largest number there is
_START_FIELDS = (
    *(
        "global_batch_size",
        "versions",
        "precision",
        "learning_rate",
        "parameters",
        "trainable_parameters",
    ),
    *("not_read", "empty_answers"),
)
_KEPT_FIGURES = ("max_steps", "epoch", "loss", "samples_per_s", "train_samples_per_s")
_END_FIELDS = (
    *(
        "steps",
        "epochs",
        "train_runtime_s",
        "train_samples_per_s",
        "train_loss",
        "eval_loss",
        "first_eval_loss",
    ),
    *("eval_step", "metrics"),
    *(
        "exact_match",
        "global_batch_size",
        "useful_tokens_per_s",
        "padded_tokens_per_s",
        "profiled_tokens",
    ),
    *("step_s", "micro_batch_s"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is. What is not known yet is None."""

    state: RunState
    message: str = ""
    step: int | None = None
    """Optimizer steps taken."""
    max_steps: int | None = None
    epoch: float | None = None
    """Passes over the rows."""
    loss: float | None = None
    """Training loss at the last step."""
    eval_loss: float | None = None
    samples_per_s: float | None = None
    """Rows a second over all training steps so far, all ranks together."""
    eta_s: float | None = None
    """Seconds until the last step, at the pace so far."""


class RunTotals:
    """What is known of a run by its events so far. Memory does not grow with the steps."""

    def __init__(self) -> None:
        self.start: Mapping[str, object] = {}
        """What rank 0 reported when training began: model, parameters, world_size, max_steps, …"""
        self.phases: dict[int, str] = {}
        self.doing = ""
        """What rank 0 is doing, with how far it is where it tells that."""
        self.training = False
        """Whether the first optimizer step is done."""
        self.saved_step = 0
        """The step of the last checkpoint; 0 before the first."""
        self.stopped_step: int | None = None
        """The step after which the trainer stopped because it was asked to; None where it did not."""
        self.failed_saves: list[Event] = []
        """By the rank that could not write its part: checkpoints that were not made."""
        self.last_s: float | None = None
        """When the last event was."""
        self.last_step: Event | None = None
        self.eval_loss: float | None = None
        """That of the last evaluation, which may be the one before the first step."""
        self.metrics: Mapping[str, float] = {}
        """The other figures of the last evaluation, by name."""
        self.notes: list[str] = []
        """What rank 0 wants said of the run, whatever becomes of it."""
        self.book = WorkerBook()
        """Its epochs, and what each worker and GPU took."""
        self.restarts: list[Restart] = []
        """What it lost, and how it went on."""
        self.model_step: int | None = None
        """The step of the model that rank 0 has saved; None before."""
        self._eval_step: int | None = None
        self._first_step: Event | None = None
        self._first_step_s: float | None = None
        self._first_eval_loss: float | None = None
        self._resumed_step: int | None = None
        self._end: Mapping[str, object] = {}
        self._devices: dict[int, str] = {}
        self._traffic: dict[int, Event] = {}

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        totals = cls()
        for event in events:
            totals.take(event)
        return totals

    def take(self, event: Event) -> tuple[RunState, str] | None:
        """Take in the next event; return the state and the words for it where the run comes to something new."""
        try:
            return self._take(event)
        except Exception:  # the border of one event: whatever a rank has printed, the others count
            logger.warning(
                "an event of kind %r is left out of the figures", event.kind[:80], exc_info=True
            )
            return None

    def _take(self, event: Event) -> tuple[RunState, str] | None:  # noqa: C901, PLR0912
        self.last_s = event.time_s
        self.book.take(event)
        rank = event.rank
        match event.kind:
            case EventKind.STEP:
                self.last_step = _with_figures(event, self.last_step)
                self._first_step = self._first_step or event
            case EventKind.EVAL:
                self.eval_loss, self._eval_step = event.number("eval_loss"), event.whole("step")
                self.metrics = numbers_of(event.data.get("metrics"))
                self._first_eval_loss = (
                    self.eval_loss if self._eval_step == 0 else self._first_eval_loss
                )
            case EventKind.PHASE if rank is not None:
                self.phases[rank] = event.text("name")
                if rank == 0:
                    self.doing = _doing(event)
                    return RunState.RUNNING if self.training else RunState.STARTING, self.doing
            case EventKind.FIRST_STEP:
                first, self.training = not self.training, True
                if (
                    self.restarts
                    and self._first_step is None
                    and (lost_s := self.restarts[-1].lost_s) is not None
                ):
                    self.restarts[-1] = replace(
                        self.restarts[-1], took_s=max(0.0, event.time_s - lost_s)
                    )
                if rank == 0 and self._first_step_s is None:
                    self._first_step_s = event.time_s
                return (RunState.RUNNING, "training") if first else None
            case EventKind.START:
                self.start = event.data
            case EventKind.END:
                self._end = event.data
            case EventKind.CHECKPOINT:
                self.saved_step = event.whole("step") or self.saved_step
            case EventKind.CHECKPOINT_FAILED:
                self.failed_saves.append(event)
            case EventKind.SAVED:
                self.model_step = event.whole("step")
            case EventKind.NOTE if len(self.notes) < _MOST_NOTES:
                self.notes.append(event.text("message"))
            case EventKind.STOPPED:
                self.stopped_step = event.whole("step")
            case EventKind.RESTARTED:
                self._restart(event)
            case EventKind.RESUMED:
                self._resumed_step = event.whole("step")
            case EventKind.DEVICE if rank is not None:
                self._devices[rank] = event.text("name")
            case EventKind.TRAFFIC if rank is not None:
                self._traffic[rank] = event
        return None

    def _restart(self, event: Event) -> None:
        """Begin anew with what is of one attempt."""
        restart = Restart.read(
            {**event.data, "took_s": max(0.0, event.time_s - (event.number("lost_s") or 0.0))}
        )
        self.restarts.append(restart)
        self.training, self.phases, self.doing, self.saved_step = False, {}, "", restart.step or 0
        self._first_step = self._resumed_step = None
        self._devices, self._traffic = {}, {}

    @property
    def reached_step(self) -> int | None:
        return None if self.last_step is None else self.last_step.whole("step")

    @property
    def last_possible_step(self) -> int | None:
        """The step after which training ends; None before it began."""
        return whole(self.start.get("max_steps"))

    @property
    def samples_per_s(self) -> float | None:
        """The throughput that is shown: rows a second over all steps so far, or a script's own rate as it was last."""
        ended, step = number(self._end.get("train_samples_per_s")), self.last_step
        if ended is not None or step is None:
            return ended
        so_far = step.number("train_samples_per_s")
        return step.number("samples_per_s") if so_far is None else so_far

    def progress(self, state: RunState, message: str) -> Progress:
        step = self.last_step or Event(time_s=0.0, rank=None, kind=EventKind.STEP)
        return Progress(
            state=state,
            message=message,
            step=step.whole("step"),
            max_steps=step.whole("max_steps"),
            epoch=step.number("epoch"),
            loss=step.number("loss"),
            eval_loss=self.eval_loss,
            samples_per_s=self.samples_per_s,
            eta_s=None if state.is_terminal else self._eta_s(),
        )

    def facts(self, started_s: float | None) -> dict[str, object]:
        """Return the figures that the ranks reported, by the name of the result's field; unknown ones are left out."""
        facts: dict[str, object] = {
            name: self.start[name] for name in _START_FIELDS if name in self.start
        }
        if self.last_step is not None:
            facts |= {
                "steps": self.last_step.whole("step"),
                "epochs": self.last_step.number("epoch"),
            }
        if self._first_step_s is not None and started_s is not None:
            facts["time_to_first_step_s"] = round(self._first_step_s - started_s, 3)
        lists: dict[str, Sequence[Any]] = {
            "restarts": self.restarts,
            "epoch_times": self.book.epochs,
        }
        lists |= {"workers": self.book.workers, "gpus": self.book.gpus}
        # Of an untrained model that was evaluated, a run that ended before the next evaluation has nothing to say.
        evaluated = {
            "eval_loss": self.eval_loss,
            "eval_step": self._eval_step,
            "metrics": self.metrics,
        }
        facts |= {
            "resumed_step": self._resumed_step,
            **{
                name: [asdict(each) for each in several]
                for name, several in lists.items()
                if several
            },
            "first_eval_loss": self._first_eval_loss,
            **(evaluated if self._eval_step else {}),
            **{name: value for name, value in self._end.items() if name in _END_FIELDS},
            "train_samples_per_s": self.samples_per_s,
        }
        loss = number(facts.get("eval_loss"))
        facts["metrics"] = numbers_of(facts.get("metrics")) or None
        if self.start.get("family") == _CAUSAL and loss is not None and loss < _MOST_NATS:
            facts["perplexity"] = math.exp(loss)
        if self._devices:
            names = dict.fromkeys(self._devices[rank] for rank in sorted(self._devices))
            facts |= {"device": ", ".join(names), "devices": len(self._devices)}
        facts["sent_bytes_per_step"] = self._sent_bytes_per_step()
        return {name: value for name, value in facts.items() if value is not None}

    def _eta_s(self) -> float | None:
        first, last = self._first_step, self.last_step
        if first is None or last is None:
            return None
        begun, step, steps = first.whole("step"), last.whole("step"), last.whole("max_steps")
        if begun is None or step is None or steps is None or step <= begun:
            return None
        return (last.time_s - first.time_s) / (step - begun) * (steps - step)

    def _sent_bytes_per_step(self) -> float | None:
        sent, pods = 0.0, 0.0
        for event in self._traffic.values():
            size, steps, ranks = (
                event.whole("sent_bytes"),
                event.whole("steps"),
                event.whole("ranks_on_pod"),
            )
            if size is None or not steps or not ranks or steps < 1 or ranks < 1:
                return None
            sent, pods = sent + size / steps, pods + 1 / ranks
        return sent / pods if pods and len(self._traffic) == len(self._devices) else None


class TotalsTail:
    """The totals of an `events.jsonl`, of which each look reads only what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._file, self._size = (0, 0), 0
        self._begin()

    def read(self) -> RunTotals:
        """Return the totals of all events so far; any thread may call it."""
        with self._lock, suppress(OSError):  # not there yet, or gone: what was read before stands
            found = self._path.stat()
            # Another file of that name, or one that was cut: what was read before is not in it.
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._size:
                self._begin()
            self._file, self._size = (found.st_dev, found.st_ino), found.st_size
            for event in self._tail.read():
                self._totals.take(event)
        return self._totals

    def _begin(self) -> None:
        self._tail, self._totals = EventTail(self._path), RunTotals()

    def __reduce__(self) -> tuple[type[TotalsTail], tuple[Path]]:
        """Let a copy in another process read for itself."""
        return TotalsTail, (self._path,)


def _with_figures(event: Event, last: Event | None) -> Event:
    """Return a step event; one that tells only how far the run is keeps the figures of the last that had a loss.

    Example:
        >>> first = Event(time_s=1.0, rank=0, kind="step", data={"step": 500, "loss": 2.5})
        >>> dict(_with_figures(Event(time_s=2.0, rank=0, kind="step", data={"step": 510}), first).data)
        {'loss': 2.5, 'step': 510}
    """
    if last is None or "loss" in event.data:
        return event
    kept = {name: last.data[name] for name in _KEPT_FIGURES if name in last.data}
    return replace(event, data={**kept, **event.data})


def _doing(event: Event) -> str:
    done, total = event.whole("done"), event.whole("total")
    return event.text("name") + (f" {done} of {total}" if done is not None and total else "")
