"""Write and read events: lines of `@workbench ` and a JSON object.

Uses only the standard library, because ranks import the module.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.base.clock import now_s
from workbench.base.files import open_record
from workbench.base.json_values import (
    as_float,
    as_int,
    as_list,
    as_str,
    get_object,
    parse_record,
    try_record,
)
from workbench.base.process import RUN_MARK
from workbench.base.table import data_frame

if TYPE_CHECKING:
    from pandas import DataFrame

MARK = "@workbench "
_LONGEST_LINE = 1 << 20  # bytes; an event is far shorter
_BLOCK_BYTES = 1 << 20
_LARGEST_NUMBER = 1 << 53
_CRC = b', "crc": '
OWN_NAMES = frozenset({"time_s", "rank", "kind", "attempt", "offset", "printed_by"})
"""Names of an event's own fields. Data of these names are not kept."""


class EventKind(StrEnum):
    """Kinds of events. The text of a kind lists the names of its data."""

    PHASE = "phase"
    """A rank begins or continues a phase: name, done, total."""
    DEVICE = "device"
    """Device of a rank: name, pod, threads, cores, backend of its collectives."""
    EPOCH = "epoch"
    """A rank ended a pass over the rows.

    Data: epoch, steps and seconds of the pass, total_s of all steps.
    """
    START = "start"
    """Training begins.

    Data: model, family, parameters, trainable_parameters, world_size, global_batch_size, max_steps
    and more.
    """
    RESUMED = "resumed"
    """The run continued from a checkpoint: step."""
    RESTARTED = "restarted"
    """The run restarted after a loss.

    Data: what, why, lost_step, step (None for a script), pods, ranks, lost_s.
    """
    FIRST_STEP = "first_step"
    """A rank finished its first optimizer step."""
    STEP = "step"
    """Optimizer steps so far: step, max_steps, epoch, loss, grad_norm, learning_rate and rates.

    The rates are samples_per_s since the previous event and train_samples_per_s of all steps so
    far. aux_loss is the load-balancing loss of a mixture of experts. A script's Trainer also
    reports steps without a log entry; their events have no loss.
    """
    PACE = "pace"
    """Rank 0 compared the ranks over some steps: steps, step_s, own_s.

    step_s is the mean time of a step. own_s lists, for every rank, the mean time in a step of work
    in which the rank waits for no other: fetching rows, and forward passes if ranks run them alone.
    """
    EVAL = "eval"
    """An evaluation: step, eval_loss, perplexity, metrics (an object of numbers)."""
    MEMORY = "memory"
    """Current and peak memory of a rank.

    Data: step, rss_gib, peak_rss_gib, cuda_reserved_gib, cuda_allocated_gib.
    """
    SAMPLE = "sample"
    """No event of a run. Samples of the pods' memory have a file of their own.

    A rank's line of the kind is plain text.
    """
    CHECKPOINT = "checkpoint"
    """All ranks wrote a checkpoint: step, bytes, took_s."""
    CHECKPOINT_FAILED = "checkpoint_failed"
    """A rank failed to write a checkpoint: step, message."""
    UPLOADED = "uploaded"
    """The keeper uploaded a checkpoint to an object store: step, bytes, bytes that the pods sent
    themselves (by_pods), took_s, address."""
    UPLOAD_FAILED = "upload_failed"
    """The keeper failed to upload a checkpoint: step, message, address."""
    SAVED = "saved"
    """The trained model was saved, before any later work that can fail: step."""
    NOTE = "note"
    """A message for the user, shown for every outcome of the run: message."""
    STOPPED = "stopped"
    """The trainer stopped on request: step."""
    TRAFFIC = "traffic"
    """Network traffic of a rank's pod: sent_bytes, steps, ranks_on_pod."""
    END = "end"
    """Figures of the whole training: fields of `ResultRecord`."""


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
"""Kinds of events that decide the state of a run. A job lists the kinds allowed for its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Report of a rank or of the keeper."""

    time_s: float
    """Time of the report in seconds since 1970, by the reporter's clock."""
    rank: int | None
    """Rank. None: the keeper."""
    kind: str
    """An `EventKind`, or a kind of a later version."""
    data: Mapping[str, object] = field(default_factory=dict)
    attempt: int | None = None
    """Number of restarts before the event. None: unknown."""
    offset: int | None = None
    """Offset of the event's line in the rank's standard output of the attempt, in bytes.

    None: an event of the keeper.
    """
    printed_by: int | None = None
    """Rank whose output has the event. None: the rank of the event."""

    def to_json(self) -> str:
        numbers = _numbers_of(self)
        if self.printed_by not in (None, self.rank):
            numbers["printed_by"] = self.printed_by
        return json.dumps(
            {
                "time_s": round(self.time_s, 3),
                "rank": self.rank,
                "kind": self.kind,
                **self.data,
                **numbers,
            }
        )

    @property
    def output(self) -> int | None:
        """Rank whose output has the event. None: the keeper reported the event."""
        return self.rank if self.printed_by is None else self.printed_by

    def number(self, name: str) -> float | None:
        """Return a number from the data, possibly not finite. None: no number of the name."""
        match self.data.get(name):
            case float() as value:
                return value  # may be infinite or NaN: the user must see a diverged loss
            case value:
                return as_int(value)

    def whole(self, name: str) -> int | None:
        """Return a whole number from the data. None: no whole number of the name."""
        return as_int(self.data.get(name))

    def text(self, name: str) -> str:
        """Return a text from the data. Empty: no text of the name."""
        return as_str(self.data.get(name))


def emit(kind: str, **data: object) -> None:
    """Print an event from a rank, in a single write so that other output cannot split the line."""
    emit_event(Event(time_s=now_s(), rank=int(os.environ.get("RANK", "0")), kind=kind, data=data))


def emit_event(event: Event) -> None:
    """Print an event with its own time, which may be in the past."""
    sys.stdout.flush()
    line = MARK + event.to_json()
    # A leading newline ends a half-drawn progress bar on the line.
    os.write(1, f"\n{line}\n".encode())


def log(step: int, **figures: object) -> None:
    """Report figures of a script to the panel of its run, TensorBoard and `history`.

    Rank 0 reports. Other ranks, and a script outside a run, do nothing.

    Args:
        step: Optimizer steps so far.
        figures: Numbers, or values that `float` converts. The panel shows `loss`, `max_steps`,
            `epoch`, `learning_rate`, `grad_norm`, `samples_per_s` and `eval_loss`. Every other
            figure is a curve in TensorBoard and in `run.plot(NAME)`, and a column of `compare`.
            A figure cannot be named `time_s`, `rank`, `kind`, `attempt`, `offset` or
            `printed_by`. A line in the rank's output reports such a name, and a value that is no
            number. None is no value.
    """
    if RUN_MARK not in os.environ or os.environ.get("RANK", "0") != "0":
        return
    whole_step = _number("step", step, whole=True)
    if whole_step is None:
        return
    numbers: dict[str, float] = {}
    # A figure that cannot be recorded is named once, and never ends the script.
    for given, value in figures.items():
        if given in OWN_NAMES:
            why = "every event has a field of the same name. Choose another name"
            _report_unused(given, why)
            continue
        name = _name_beside(given, _product_names)
        number = _number(given, value, whole=name == "max_steps")
        if number is not None:
            numbers[name] = number
    # The prefix tells figures of an evaluation from figures of a step.
    evaluated = {name: value for name, value in numbers.items() if name.startswith("eval_")}
    trained = {name: value for name, value in numbers.items() if name not in evaluated}
    with suppress(OSError):  # the reader of the output has gone
        if set(trained) - {"epoch", "max_steps"}:
            emit(EventKind.STEP, step=whole_step, **trained)
        if evaluated:
            metrics = {
                name.removeprefix("eval_"): value
                for name, value in evaluated.items()
                if name != "eval_loss"
            }
            emit(
                EventKind.EVAL,
                step=whole_step,
                eval_loss=evaluated.get("eval_loss"),
                metrics=metrics,
            )


_refused: set[str] = set()
_product_names: set[str] = set()


def keep_names(names: Collection[str]) -> None:
    """Keep names of figures in this process for the product; `log` puts `log.` before the names."""
    _product_names.update(names)


def _name_beside(name: str, kept: Set[str]) -> str:
    """Return the name under which `log` reports a figure, such as `eval_log.loss`."""
    short = name.removeprefix("eval_")
    if kept.isdisjoint((name, short, f"eval_{short}")):
        return name
    return f"eval_log.{short}" if name != short else f"log.{name}"


def _number(name: str, value: Any, *, whole: bool) -> float | None:
    """Return a value as a number. None, with a line in the output: the value is no number."""
    if value is None:
        return None
    try:
        return int(value) if whole else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        _report_unused(name, f"a value of type {type(value).__name__} is no number")
        return None


def _report_unused(name: str, why: str) -> None:
    """Report a figure that is not recorded, once for every name."""
    if name in _refused:
        return
    _refused.add(name)
    with suppress(OSError):
        print(
            f"workbench.log: the figure {name!r} is not recorded, because {why}.",
            file=sys.stderr,
            flush=True,
        )


def parse_event(line: str, *, states: Collection[str] = STATE_EVENTS) -> Event | None:
    """Read a line of a rank's output.

    State events that are not in `states` count as plain text.

    Example:
        >>> line = '@workbench {"time_s": 1.5, "rank": 0, "kind": "step", "loss": 2.0}'
        >>> parse_event(line).data["loss"]
        2.0
        >>> parse_event("Loading weights") is None
        True
    """
    if not line.startswith(MARK):
        return None
    event = event_of(try_record(line[len(MARK) :]))
    is_text = event is not None and event.kind in STATE_EVENTS and event.kind not in states
    return None if is_text else event


class EventTail:
    """Read an `events.jsonl` from the end of the previous read. Damaged lines are left out."""

    def __init__(self, path: Path, last_bytes: int | None = None):
        self.damaged = 0
        """Number of lines so far whose checksum is wrong."""
        self._path = path
        self.offset = 0
        """Number of bytes that were read."""
        if last_bytes is not None and path.exists():
            self.offset = max(0, path.stat().st_size - last_bytes)

    def read(self) -> Iterator[Event]:
        """Yield the events since the previous read; skip broken and unfinished lines."""
        rest = b""
        # If the file is not there yet, or is gone, keep the earlier events.
        with suppress(OSError), open_record(self._path) as file:
            file.seek(self.offset)
            while len(rest) <= _LONGEST_LINE and (block := file.read(_BLOCK_BYTES)):
                *lines, rest = (rest + block).split(b"\n")
                whole = [content for line in lines if (content := checked(line)) is not None]
                self.damaged += len(lines) - len(whole)
                yield from filter(None, map(event_of, records_in(whole)))
            self.offset = file.tell() - len(rest)


def recorded_line(event: Event) -> str:
    """Return the line of an `events.jsonl`: the event's JSON object with a checksum as `crc`."""
    content = event.to_json().encode()
    return (content[:-1] + _CRC + b"%d}\n" % zlib.crc32(content)).decode()


def checked(line: bytes) -> bytes | None:
    """Return a line without its checksum, if any. None: the checksum is wrong."""
    content, mark, crc = line.rpartition(_CRC)
    if not mark:
        return line
    content += b"}"
    return content if crc == b"%d}" % zlib.crc32(content) else None


def read_events(path: Path) -> Iterator[Event]:
    """Read an `events.jsonl`; skip an unfinished last line. An unreadable file yields no events."""
    return EventTail(path).read()


@dataclass(frozen=True, slots=True)
class Events:
    """Events of a run, read again on every iteration."""

    path: Path
    """Path of the `events.jsonl`."""

    def __iter__(self) -> Iterator[Event]:
        return read_events(self.path)

    def to_dataframe(self) -> DataFrame:
        """Return the events as a pandas DataFrame, with a row per event.

        Columns: time_s, rank, kind, attempt and offset where known, and a column per name of
        data and metrics.
        """
        rows = (
            {
                **{name: value for name, value in event.data.items() if name != "metrics"},
                **{
                    f"metric.{name}": value
                    for name, value in get_object(event.data, "metrics").items()
                },
                **{"time_s": event.time_s, "rank": event.rank, "kind": event.kind},
                **_numbers_of(event),
            }
            for event in self
        )
        return data_frame(rows, ("time_s", "rank", "kind"))


def _numbers_of(event: Event) -> dict[str, int | None]:
    """Return attempt and offset of an event by name, where known."""
    numbers = {"attempt": event.attempt, "offset": event.offset}
    return {name: number for name, number in numbers.items() if number is not None}


def event_of(raw: object) -> Event | None:
    """Read the JSON form of an event. Return None if `raw` is not an event."""
    match raw:
        case {"time_s": time, "kind": str() as kind, "rank": rank, **data}:
            time_s = as_float(time)
            its_rank = as_int(rank)
            if time_s is not None and its_rank == rank:
                attempt = _counted(data.pop("attempt", None))
                offset = _counted(data.pop("offset", None))
                printed_by = _counted(data.pop("printed_by", None))
                return Event(
                    time_s=time_s,
                    rank=its_rank,
                    kind=kind,
                    data={str(name): data[name] for name in data},
                    attempt=attempt,
                    offset=offset,
                    printed_by=printed_by,
                )
    return None


def _counted(value: object) -> int | None:
    """Return a number of the journal. None: no such number."""
    counted = as_int(value)
    if counted is None or not 0 <= counted < _LARGEST_NUMBER:
        return None
    return counted


def records_in(lines: Sequence[bytes]) -> list[object]:
    """Return the JSON values of lines; skip broken and empty lines."""
    lines = [line for line in lines if line.strip()]
    try:
        # A single call for all lines is twice as fast as a call per line.
        return as_list(parse_record(b"[" + b",".join(lines) + b"]"))
    except ValueError:
        return [raw for raw in map(try_record, lines) if raw is not None]
