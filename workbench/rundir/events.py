"""The lines by which a rank speaks: `@workbench ` and one JSON object. Standard library only: ranks import this."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.clock import now_s
from workbench.base.files import open_record
from workbench.base.json_values import items, number, parse_record, part, text, whole
from workbench.base.process import RUN_MARK
from workbench.base.table import data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

MARK = "@workbench "
_LONGEST_LINE = 1 << 20  # bytes; an event is far shorter
_BLOCK_BYTES = 1 << 20


class EventKind(StrEnum):
    """What an event is about; of each kind, the names of its data."""

    PHASE = "phase"
    """A rank begins with something, or is so far with it: name, done, total."""
    DEVICE = "device"
    """What a rank computes on: name, pod, threads, cores, backend of its collectives."""
    EPOCH = "epoch"
    """A rank ended a pass over the rows: epoch, steps and seconds in it, total_s of all its steps."""
    START = "start"
    """Training begins: model, family, parameters, trainable_parameters, world_size, global_batch_size, max_steps, …"""
    RESUMED = "resumed"
    """It went on from a checkpoint: step."""
    RESTARTED = "restarted"
    """It lost something and begins once more: what, why, lost_step, step (None for a script), pods, ranks, lost_s."""
    FIRST_STEP = "first_step"
    """A rank did its first optimizer step."""
    STEP = "step"
    """Optimizer steps so far: step, max_steps, epoch, loss, grad_norm, learning_rate; samples_per_s since the event
    before, and train_samples_per_s of all steps so far; aux_loss, the load-balancing loss of a mixture of experts. A
    Trainer of a script reports steps that it does not log too: such an event has no loss."""
    EVAL = "eval"
    """An evaluation: step, eval_loss, perplexity, metrics (an object of numbers)."""
    MEMORY = "memory"
    """A rank's memory now and at its peak: step, rss_gib, peak_rss_gib, cuda_reserved_gib, cuda_allocated_gib."""
    SAMPLE = "sample"
    """A pod's memory, by its agent: pod, host, rss_gib, gpus (a list of index, percent, used_gib, total_gib)."""
    CHECKPOINT = "checkpoint"
    """All ranks wrote one: step, bytes, took_s."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A rank could not: step, message."""
    SAVED = "saved"
    """The trained model was saved, before all that can still fail: step."""
    NOTE = "note"
    """What a person should read of the run whatever becomes of it: message."""
    STOPPED = "stopped"
    """The trainer stopped because it was asked to: step."""
    TRAFFIC = "traffic"
    """What a rank's pod sent: sent_bytes, steps, ranks_on_pod."""
    END = "end"
    """Figures of the whole training: those of `ResultRecord`."""


STATE_EVENTS = frozenset(
    {
        EventKind.PHASE,
        EventKind.FIRST_STEP,
        EventKind.RESUMED,
        EventKind.STOPPED,
        EventKind.SAMPLE,
        EventKind.RESTARTED,
        EventKind.CHECKPOINT,
        EventKind.CHECKPOINT_FAILED,
    }
)
"""Kinds of events that decide how a run stands. A job says which of them its ranks may send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that a rank, or the keeper, reported."""

    time_s: float
    """Seconds since 1970, by the clock of who reported it."""
    rank: int | None
    """The rank; None for the keeper."""
    kind: str
    """An `EventKind`, or what a later version adds."""
    data: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {"time_s": round(self.time_s, 3), "rank": self.rank, "kind": self.kind, **self.data}
        )

    def number(self, name: str) -> float | None:
        """Return a number of its data, which may be no finite one; None where there is none of that name."""
        match self.data.get(name):
            case float() as value:
                return value  # one that is not finite too: a loss that is none is news
            case value:
                return whole(value)

    def whole(self, name: str) -> int | None:
        """Return a whole number of its data; None where there is none of that name."""
        return whole(self.data.get(name))

    def text(self, name: str) -> str:
        """Return a text of its data; empty where there is none of that name."""
        return text(self.data.get(name))


def format_event(kind: str, *, rank: int | None, **data: object) -> str:
    """Make the line for an event that happens now, without the newline."""
    return MARK + Event(time_s=now_s(), rank=rank, kind=kind, data=data).to_json()


def emit(kind: str, **data: object) -> None:
    """Print an event from inside a rank, in one write so that other output cannot cut it."""
    emit_event(Event(time_s=now_s(), rank=int(os.environ.get("RANK", "0")), kind=kind, data=data))


def emit_event(event: Event) -> None:
    """Print an event that may have happened before now."""
    sys.stdout.flush()
    line = MARK + event.to_json()
    # A leading newline ends whatever progress bar stands half drawn on the line.
    os.write(1, f"\n{line}\n".encode())


def log(step: int, **figures: object) -> None:
    """Report figures of a script: they stand in the panel of its run, in TensorBoard and in `history`.

    Rank 0 reports; other ranks, and a script outside of a run, do nothing.

    Args:
        step: Optimizer steps so far.
        figures: Numbers, or what `float` takes. `loss`, `max_steps`, `epoch`, `learning_rate`, `grad_norm` and
            `samples_per_s` have a place in the panel, and `eval_loss`; any other is a curve in TensorBoard.
    """
    if RUN_MARK not in os.environ or os.environ.get("RANK", "0") != "0":
        return
    numbers: dict[str, float] = {}
    for name, value in figures.items():
        with suppress(
            TypeError, ValueError, OverflowError, RuntimeError
        ):  # what is not a number is not shown
            numbers[name] = int(value) if name == "max_steps" else float(value)  # type: ignore[call-overload, arg-type]
    evaluated = {name: value for name, value in numbers.items() if name.startswith("eval_")}
    trained = {name: value for name, value in numbers.items() if name not in evaluated}
    with suppress(OSError):  # nobody reads any more
        if set(trained) - {"epoch", "max_steps"}:
            emit(EventKind.STEP, step=int(step), **trained)
        if evaluated:
            metrics = {
                name.removeprefix("eval_"): value
                for name, value in evaluated.items()
                if name != "eval_loss"
            }
            emit(
                EventKind.EVAL,
                step=int(step),
                eval_loss=evaluated.get("eval_loss"),
                metrics=metrics,
            )


def parse_event(line: str, *, states: Collection[str] = STATE_EVENTS) -> Event | None:
    """Read one line of a rank's output; a state event that is not among `states` is only text.

    Example:
        >>> parse_event('@workbench {"time_s": 1.5, "rank": 0, "kind": "step", "loss": 2.0}').data["loss"]
        2.0
        >>> parse_event("Loading weights") is None
        True
    """
    if not line.startswith(MARK):
        return None
    try:
        event = event_of(parse_record(line[len(MARK) :]))
    except ValueError:
        return None
    is_text = event is not None and event.kind in STATE_EVENTS and event.kind not in states
    return None if is_text else event


class EventTail:
    """Read an `events.jsonl` from where the last look ended."""

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path = path
        self._offset = 0
        if last_bytes is not None and path.exists():
            self._offset = max(0, path.stat().st_size - last_bytes)

    def read(self) -> Iterator[Event]:
        """Yield the events since the last look; broken lines are left out, and one that is still being written."""
        rest = b""
        with (
            suppress(OSError),
            open_record(self._path) as file,
        ):  # not there yet, or gone: what was read before stands
            file.seek(self._offset)
            while len(rest) <= _LONGEST_LINE and (block := file.read(_BLOCK_BYTES)):
                *lines, rest = (rest + block).split(b"\n")
                yield from _events(lines)
            self._offset = file.tell() - len(rest)


def read_events(path: Path) -> Iterator[Event]:
    """Read an `events.jsonl`; a last line still being written is left out, a file that cannot be read has no events."""
    return EventTail(path).read()


@dataclass(frozen=True, slots=True)
class Events:
    """The events of a run, read anew each time that one iterates over them."""

    path: Path
    """The `events.jsonl`."""

    def __iter__(self) -> Iterator[Event]:
        return read_events(self.path)

    def to_dataframe(self) -> DataFrame:
        """Return them as a pandas DataFrame, one a row: time_s, rank, kind, and a column a name of data and metrics."""
        rows = (
            {
                **{name: value for name, value in event.data.items() if name != "metrics"},
                **{f"metric.{name}": value for name, value in part(event.data, "metrics").items()},
                **{"time_s": event.time_s, "rank": event.rank, "kind": event.kind},
            }
            for event in self
        )
        return data_frame(rows, ("time_s", "rank", "kind"))


def event_of(raw: object) -> Event | None:
    """Read the JSON form; None where it is not an event."""
    match raw:
        case {"time_s": time, "kind": str() as kind, "rank": rank, **data}:
            time_s, its_rank = number(time), whole(rank)
            if time_s is not None and its_rank == rank:
                return Event(
                    time_s=time_s,
                    rank=its_rank,
                    kind=kind,
                    data={str(name): data[name] for name in data},
                )
    return None


def _events(lines: Sequence[bytes]) -> list[Event]:
    lines = [line for line in lines if line.strip()]
    try:
        # One call for all is twice as fast as one for each.
        raws = items(parse_record(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        raws = []
        for line in lines:
            with suppress(ValueError):
                raws.append(parse_record(line))
    return [event for raw in raws if (event := event_of(raw))]
