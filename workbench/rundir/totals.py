"""Define `RunTotals`, which sums up the events of a run. Only `RunTotals` interprets the kinds.

`RunTotals` is pure. `TotalsTail` reads new events from a file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self

from workbench.base.files.records import facts_of
from workbench.base.json_values import as_float, as_int, numbers_of
from workbench.base.words import truncate
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.evaluations import Evaluations
from workbench.rundir.figures.metrics import figures_of
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.figures.trainings import Trainings
from workbench.rundir.figures.workers import WorkerBook
from workbench.rundir.result import Restart
from workbench.rundir.state import RunState
from workbench.rundir.thinned import ThinnedTail

logger = logging.getLogger(__name__)
# Notes, and failed checkpoints. A result of more than 16 MiB could not be read again.
_MOST_NOTES = 20
MOST_FIGURES = 50  # names of figures, so that memory stays bounded
_START_FIELDS = (
    "global_batch_size",
    "versions",
    "precision",
    "learning_rate",
    "parameters",
    "trainable_parameters",
)
_KEPT_FIGURES = ("max_steps", "epoch", "loss", "samples_per_s", "train_samples_per_s")
_END_FIELDS = (
    "steps",
    "epochs",
    "train_runtime_s",
    "train_samples_per_s",
    "train_loss",
    "eval_loss",
    "first_eval_loss",
    "eval_step",
    "metrics",
    "global_batch_size",
    "step_s",
    "micro_batch_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run. None: unknown so far."""

    state: RunState
    message: str = ""
    step: int | None = None
    """Number of optimizer steps."""
    max_steps: int | None = None
    epoch: float | None = None
    """Number of passes over the rows."""
    loss: float | None = None
    """Training loss at the last step."""
    eval_loss: float | None = None
    samples_per_s: float | None = None
    """Rows per second over all training steps so far, all ranks together."""
    eta_s: float | None = None
    """Seconds until the last step, at the present pace."""
    early_end: str = ""
    """Time at which the platform ends the pods, if the run will not or may not end before, with the
    step that the run will reach. Empty: the run will, or no end is known."""
    slow_rank: str = ""
    """Rank whose own work takes at least 1.25 times the median of the ranks, if the difference is
    5 % of a step or more. Empty: no rank is so slow, or the ranks are not compared yet."""


class RunTotals:
    """Totals of a run's events so far. Memory does not grow with the steps."""

    def __init__(self) -> None:
        self.start: Mapping[str, object] = {}
        """Report of rank 0 at the start of training: model, parameters, world_size, max_steps, …"""
        self.phases: dict[int, str] = {}
        self.doing = ""
        """Current phase of rank 0, with its progress if known."""
        self.training = False
        """Whether the first optimizer step is finished."""
        self.saved_step = 0
        """Step of the last checkpoint. 0 before the first."""
        self.stopped_step: int | None = None
        """Step after which the trainer stopped on request.

        None: the trainer did not stop on request.
        """
        self.failed_saves: list[Event] = []
        """Events of failed checkpoints, from the ranks that could not write their parts."""
        self.last_s: float | None = None
        """Time of the last event in seconds since 1970."""
        self.last_step: Event | None = None
        self._evaluations = Evaluations()
        self._trainings = Trainings()
        self.step_figures: dict[str, float] = {}
        """Last value of every figure of the steps, by name."""
        self.curve_names: set[str] = set()
        """Names of the curves that the run has so far."""
        self.has_more_figures = False
        """Whether events have figures of further names."""
        self._notes: list[str] = []
        self.book = WorkerBook()
        """Epochs, and time and memory of every worker."""
        self.restarts: list[Restart] = []
        """Losses and restarts of the run."""
        self.model_step: int | None = None
        """Step of the model saved by rank 0. None: not saved yet."""
        self._first_step: Event | None = None
        self._first_step_s: float | None = None
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
        """Process the next event.

        Return the new state and its message if the event changes the state.
        """
        try:
            return self._take(event)
        except Exception:  # a rank may print any event; the other events still count
            logger.warning(
                "an event of kind %r is left out of the figures", event.kind[:80], exc_info=True
            )
            return None

    def _take(self, event: Event) -> tuple[RunState, str] | None:  # noqa: C901, PLR0912
        self.last_s = event.time_s
        self.book.take(event)
        self._note_figures(event)
        rank = event.rank
        # Only a phase or the first step changes the state of the run.
        match event.kind:
            case EventKind.STEP:
                self.last_step = _with_figures(event, self.last_step)
                self._first_step = self._first_step or event
            case EventKind.EVAL:
                self._evaluations.take(event)
            case EventKind.PHASE if rank is not None:
                self.phases[rank] = event.text("name")
                if rank == 0:
                    self.doing = _doing(event)
                    state = RunState.RUNNING if self.training else RunState.STARTING
                    return state, self.doing
            # The first step also ends a restart: its duration is known now.
            case EventKind.FIRST_STEP:
                was_training = self.training
                self.training = True
                if self.restarts and self._first_step is None:
                    self._end_restart(event)
                if rank == 0 and self._first_step_s is None:
                    self._first_step_s = event.time_s
                if not was_training:
                    return RunState.RUNNING, "training"
            case EventKind.START:
                self.start = event.data
            case EventKind.END:
                self._end = event.data
            case EventKind.CHECKPOINT:
                self.saved_step = event.whole("step") or self.saved_step
            case EventKind.CHECKPOINT_FAILED if len(self.failed_saves) < _MOST_NOTES:
                self.failed_saves.append(event)
            case EventKind.SAVED:
                self.model_step = event.whole("step")
            case EventKind.NOTE if len(self._notes) < _MOST_NOTES:
                self._notes.append(truncate(event.text("message")))
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

    def _note_figures(self, event: Event) -> None:
        """Keep the names of a step's or an evaluation's figures, and the last values of steps."""
        figures = figures_of(event)
        # Another rank may be a step behind.
        if event.kind == EventKind.STEP and event.rank in (None, 0):
            self._trainings.take(event.whole("step"), figures)
        for name, value in figures.items():
            if name not in self.curve_names:
                if len(self.curve_names) >= MOST_FIGURES:
                    self.has_more_figures = True
                    continue
                self.curve_names.add(name)
            if event.kind == EventKind.STEP:
                # A value that is not finite must not leave an older value in its place.
                self.step_figures.pop(name, None)
                if math.isfinite(value):
                    self.step_figures[name] = value

    def _end_restart(self, event: Event) -> None:
        """Record the time from the loss to the first step after the last restart."""
        restart = self.restarts[-1]
        if restart.lost_s is not None:
            took_s = max(0.0, event.time_s - restart.lost_s)
            self.restarts[-1] = replace(restart, took_s=took_s)

    def _restart(self, event: Event) -> None:
        """Record a restart and reset the totals of the previous attempt."""
        lost_s = event.number("lost_s") or 0.0
        took_s = max(0.0, event.time_s - lost_s)
        restart = Restart.read({**event.data, "took_s": took_s})
        self.restarts.append(restart)
        self.training = False
        self.phases = {}
        self.doing = ""
        self.saved_step = restart.step or 0
        self._first_step = None
        self._trainings.restart()
        self._resumed_step = None
        self._devices = {}
        self._traffic = {}

    @property
    def eval_loss(self) -> float | None:
        """Loss of the last evaluation, including the evaluation before the first step."""
        return self._evaluations.loss

    @property
    def metrics(self) -> Mapping[str, float]:
        """Last values of the other figures of evaluations, by name."""
        return self._evaluations.metrics

    @property
    def notes(self) -> list[str]:
        """Notes for the user, shown for every outcome of the run."""
        return [*self._notes, *filter(None, [self._trainings.note()])]

    @property
    def ended_trainings(self) -> int:
        """Number of trainings in the run before the last one."""
        return self._trainings.ended

    @property
    def reached_step(self) -> int | None:
        if self.last_step is None:
            return None
        return self.last_step.whole("step")

    @property
    def last_possible_step(self) -> int | None:
        """Step after which training ends. None before the start of training."""
        return as_int(self.start.get("max_steps"))

    @property
    def samples_per_s(self) -> float | None:
        """Throughput for display in rows per second.

        The mean over all steps so far, or a script's own last rate.
        """
        ended = as_float(self._end.get("train_samples_per_s"))
        step = self.last_step
        if ended is not None or step is None:
            return ended
        so_far = step.number("train_samples_per_s")
        if so_far is not None:
            return so_far
        return step.number("samples_per_s")

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
            eta_s=None if self._is_ending(state) else self._eta_s(),
            slow_rank=self.book.slow_rank,
        )

    def facts(self, started_s: float | None) -> dict[str, object]:
        """Return the ranks' figures by field of the result, without unknown figures."""
        # A kind of job may report its own facts at the start, at the end or at an evaluation.
        of_kinds = facts_of_kinds()
        facts: dict[str, object] = {}
        for name in (*_START_FIELDS, *of_kinds):
            if name in self.start:
                facts[name] = self.start[name]
        # Figures so far come first. Those of the end replace them below.
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
            "workers": self.book.workers,
        }
        facts["resumed_step"] = self._resumed_step
        facts["slow_rank"] = self.book.slow_rank or None
        for name, several in lists.items():
            if several:
                facts[name] = [asdict(each) for each in several]
        facts["first_eval_loss"] = self._evaluations.first_loss
        facts |= self._evaluations.of_trained_model()
        # The report at the end of training wins over the figures on the way.
        for name, value in self._end.items():
            if name in _END_FIELDS or name in of_kinds:
                facts[name] = value
        facts["train_samples_per_s"] = self.samples_per_s
        facts["metrics"] = numbers_of(facts.get("metrics")) or None
        facts["step_figures"] = self.step_figures or None
        if self._devices:
            names = dict.fromkeys(self._devices[rank] for rank in sorted(self._devices))
            facts["device"] = ", ".join(names)
            facts["devices"] = len(self._devices)
        facts["sent_bytes_per_step"] = self._sent_bytes_per_step()
        return {name: value for name, value in facts.items() if value is not None}

    def _is_ending(self, state: RunState) -> bool:
        return state.is_terminal or self.stopped_step is not None

    def _eta_s(self) -> float | None:
        first = self._first_step
        last = self.last_step
        if first is None or last is None:
            return None
        begun = first.whole("step")
        step = last.whole("step")
        steps = last.whole("max_steps")
        if begun is None or step is None or steps is None:
            return None
        if step <= begun:
            return None
        step_s = (last.time_s - first.time_s) / (step - begun)
        return step_s * (steps - step)

    def _sent_bytes_per_step(self) -> float | None:
        sent = 0.0
        pods = 0.0
        for event in self._traffic.values():
            size = event.whole("sent_bytes")
            steps = event.whole("steps")
            ranks = event.whole("ranks_on_pod")
            if size is None or not steps or not ranks or steps < 1 or ranks < 1:
                return None
            sent = sent + size / steps
            pods = pods + 1 / ranks
        # Some ranks may not have reported yet.
        if not pods or len(self._traffic) != len(self._devices):
            return None
        return sent / pods


class TotalsTail:
    """Totals of an `events.jsonl`. Every read processes only new events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._file = (0, 0)
        self._size = 0
        self._begin()

    def read(self) -> RunTotals:
        """Return the totals of all events so far. Any thread may call the method."""
        # If the file is not there yet, or is gone, keep the earlier totals.
        with self._lock:
            found = facts_of(self._path)
            if found is None:
                return self._totals
            # A replaced or truncated file lacks the earlier events, so begin again.
            file = (found.st_dev, found.st_ino)
            if file != self._file or found.st_size < self._size:
                self._begin()
            self._file = file
            self._size = found.st_size
            for event in self._tail.read():
                self._totals.take(event)
            return self._totals

    def _begin(self) -> None:
        self._tail = ThinnedTail(self._path)
        self._totals = RunTotals()

    def __reduce__(self) -> tuple[type[TotalsTail], tuple[Path]]:
        """Make a copy in another process read the file itself."""
        return TotalsTail, (self._path,)


def _with_figures(event: Event, last: Event | None) -> Event:
    """Return a step event; an event without a loss keeps the last event's figures.

    Reports of one step add up.
    """
    if last is not None and last.whole("step") == event.whole("step"):
        return replace(event, data={**last.data, **event.data})
    if last is None or "loss" in event.data:
        return event
    kept = {name: last.data[name] for name in _KEPT_FIGURES if name in last.data}
    return replace(event, data={**kept, **event.data})


def _doing(event: Event) -> str:
    done = event.whole("done")
    total = event.whole("total")
    name = event.text("name")
    if done is None or not total:
        return name
    return f"{name} {done} of {total}"
