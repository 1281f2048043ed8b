"""Record a run in progress: state, events, curves and, last, the result. Only the keeper writes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from pydantic.dataclasses import dataclass

from workbench.base.clock import now_s
from workbench.base.errors import WorkbenchError
from workbench.base.files import KeptFile, read_json, records, write_bytes, write_json
from workbench.base.files.gate import make_folders
from workbench.base.record.tolerant import TolerantRecord
from workbench.base.redact import Redactor
from workbench.pods.pod import Pod
from workbench.rundir.events import STATE_EVENTS, Event, EventKind, read_events, recorded_line
from workbench.rundir.figures.curves import ScalarWriter
from workbench.rundir.figures.samples import Sample, SampleFile
from workbench.rundir.output.missing import missing_events
from workbench.rundir.paths import RunPaths
from workbench.rundir.result import HostSlots, ResultRecord, RunFault, submitted_rows
from workbench.rundir.spec import RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import result_file
from workbench.rundir.thinned import ThinnedWriter
from workbench.rundir.totals import RunTotals

logger = logging.getLogger(__name__)
_RESERVE_BYTES = 256 << 10
_BLOCK_BYTES = 1 << 16
# Events are thinned when so many bytes are new, during a run and at its end.
_RENEWAL_BYTES = 1 << 20
_LAST_BYTES = 1 << 17
_MOST_LATE = 50_000  # events kept in memory while their file cannot be written


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRecord(TolerantRecord):
    """Content of `state.json` without the time of writing."""

    state: RunState = RunState.QUEUED
    message: str = ""
    hint: str = ""
    """Temporary remark."""
    wish: str = ""
    """Request to the run: `cancel`, `stop` or empty."""
    started_s: float | None = None
    """Time of the run's start in seconds since 1970. None: not started."""


class Journal:
    def __init__(self, paths: RunPaths, redact: Redactor | None = None, spare: Path | None = None):
        """Make the folders of logs and curves.

        `spare` is the file for a result that the directory cannot take.
        """
        self.result: Mapping[str, object] = {}
        """Result of the run, after `finish`."""
        self.is_synced = False
        """Whether all files of the ended run are on the disk."""
        self._spare = spare
        self._paths = paths
        self._redact = redact or Redactor()
        self._state_file = KeptFile(paths.state)
        self._scalars = ScalarWriter(paths.tensorboard)
        self._samples = SampleFile(paths)
        self._thinned: ThinnedWriter | None = ThinnedWriter(paths.events)
        self._now = asdict(StateRecord())
        self._late: list[str] = []  # lines of events that are not written yet
        # Whether the newest events of the ranks are in the logs only. The keeper's own events then
        # wait until the end.
        self._overflowed = False
        self._waiting: list[Event] = []
        # Offset of the last recorded event, by attempt and output.
        self._last: dict[tuple[int | None, int | None], int] = {}
        self._attempt = 0
        self._writing = threading.Lock()
        self._late_result: Mapping[str, object] | None = None
        self._late_state = False
        self._curves_broken = False
        self._warned = False
        for folder in (paths.logs, paths.tensorboard):
            make_folders(folder, paths.root)
        records.open_to_append(paths.events).close()

    def reserve(self) -> None:
        """Reserve room on the disk for the result, until `finish`.

        Raise OSError if there is no room.
        """
        if records.size_of(self._paths.reserve) != _RESERVE_BYTES:  # else from an earlier keeper
            write_bytes(self._paths.reserve, bytes(_RESERVE_BYTES))

    def recover(
        self, states: Collection[str] = STATE_EVENTS, restarts: Sequence[Event] = ()
    ) -> tuple[StateRecord, Sequence[Event]]:
        """Continue the journal of a dead keeper. Every event is present exactly once.

        Raise OSError if a log cannot be read.

        Args:
            states: Kinds of state events that the ranks may send.
            restarts: Events of all restarts that were decided. The file may lack the last.
        """
        self._samples.recover()
        _end_at_last_line(self._paths)
        written = list(read_events(self._paths.events))
        known = sum(_is_restart(event) for event in written)
        late = [
            replace(event, attempt=attempt)
            for attempt, event in enumerate(restarts, start=1)
            if attempt > known
        ]
        self._attempt = known + len(late)
        events = [*written, *self._fill(states, written, late)]
        for event in events:
            if event.offset is not None:
                self._last[event.attempt, event.output] = event.offset
        try:
            self._draw_anew(events)  # the last seconds of the curves may not have reached the disk
        except Exception as error:  # a run continues without curves
            self._curves_broken = True
            self._warn(error)
        content = read_json(self._paths.state)
        recovered = StateRecord.read(content)
        changes = asdict(recovered)
        changes["hint"] = ""
        self._change(**changes)
        return recovered, events

    def begin(self, started_s: float) -> None:
        """Record the run's start time. Another keeper may need the time for the duration."""
        self._change(started_s=started_s)

    def wish(self, wish: str) -> None:
        """Record a request to end the run: `cancel` or `stop`."""
        self._change(wish=wish)

    def state(self, state: RunState, message: str = "") -> None:
        self._change(state=state, message=message)

    @property
    def current_state(self) -> tuple[RunState, str]:
        message = self._now["message"]
        hint = self._now["hint"]
        if hint:
            message += f" ({hint})"
        return self._now["state"], message

    def hint(self, message: str) -> None:
        """Set the temporary remark of the state. Empty: no remark."""
        if message != self._now["hint"]:
            self._change(hint=message)

    @property
    def is_late(self) -> bool:
        """Whether no file has the run's result yet, or the state file lacks the last state."""
        return self._late_result is not None or self._late_state

    def keep(self, *, beat: bool = False) -> None:
        """Rewrite the state file if the file was removed or changed, or after a full disk.

        A result that no file could take is written now, if possible. With `beat`, the time of the
        state file is renewed, as a sign of life of a run without a keeper.
        """
        self._write_late()
        self._write_late_result()
        with suppress(OSError):
            self._state_file.mend(beat=beat)
            self._late_state = False

    def _write_late_result(self) -> None:
        with self._writing:
            if self._late_result is None:
                return
            try:
                write_json(self._paths.result, self._late_result)
            except (OSError, WorkbenchError):
                if self._write_spare(self.result):
                    return
            logger.info("the result of %s is written now", self._paths.root)
            self._late_result = None

    def event(self, event: Event) -> Event | None:
        """Append an event, and its numbers to the curves. A failed write is repeated later.

        Return the recorded event, or None for an event that was recorded before. Events of ranks
        have attempt and offset already. The keeper's own events get their attempt here.
        """
        with self._writing:
            if event.output is None:
                self._attempt += _is_restart(event)
                event = replace(event, attempt=self._attempt)
            if event.offset is not None:
                key = (event.attempt, event.output)
                if event.offset <= self._last.get(key, -1):
                    return None
                self._last[key] = event.offset
            self._overflowed = self._overflowed or len(self._late) >= _MOST_LATE
            if not self._overflowed:
                self._late.append(self._line(event))
            elif event.output is None:
                self._waiting.append(event)
        self._write_late()
        try:
            if not self._curves_broken:
                self._scalars.add(event)
        # The writer's thread may have ended, or its import may fail; the run continues.
        except Exception as error:
            self._curves_broken = True
            self._warn(error)
        return event

    def _line(self, event: Event) -> str:
        return recorded_line(replace(event, data=self._redact.json(event.data)))

    def sample(self, sample: Sample) -> None:
        """Record a sample of a pod's memory. A failed write is repeated with a later sample."""
        pod = self._redact(sample.pod)
        host = self._redact(sample.host)
        try:
            self._samples.add(replace(sample, pod=pod, host=host))
        except OSError as error:
            self._warn(error)

    @property
    def sampled_gib(self) -> Mapping[str, float]:
        """Highest sample of resident memory by host, in GiB."""
        return self._samples.highest_gib

    def _fill(
        self, states: Collection[str], written: Sequence[Event], own: Sequence[Event]
    ) -> list[Event]:
        """Append own events, and printed events that are not written. Return the events.

        Raise OSError if a log cannot be read.
        """
        printed = missing_events(self._paths, written, states)
        # A restart comes before the events of its attempt.
        missing = sorted([*own, *printed], key=lambda event: event.attempt or 0)
        with self._writing:
            self._late += [self._line(event) for event in missing]
        self._write_late()
        return missing

    def _write_late(self) -> None:
        with self._writing:
            if not self._late:
                return
            lines = "".join(self._late)
            try:
                _append(self._paths, lines.encode())
                self._late.clear()
            except OSError as error:
                self._warn(error)
                return
            self._thin(_RENEWAL_BYTES)

    def _thin(self, least_bytes: int) -> None:
        try:
            if self._thinned is not None:
                self._thinned.renew(least_bytes)
        except OSError as error:
            self._warn(error)
        except Exception:  # printed events may hold any values; readers then read all events
            logger.exception("the events of %s are not thinned", self._paths.root)
            self._thinned = None

    def _draw_anew(self, events: Iterable[Event]) -> None:
        """Replace the curves by new files with the values of all events.

        Raise OSError on failure.
        """
        try:
            self._scalars.close()
        except OSError as error:
            logger.info("the curves of %s are drawn anew: %s", self._paths.root, error)
        for curves in records.files_below(self._paths.tensorboard):
            if curves.name.startswith("events.out.tfevents."):
                curves.unlink(missing_ok=True)
        self._scalars = ScalarWriter(self._paths.tensorboard)
        for event in events:
            self._scalars.add(event)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            logger.warning(
                "cannot write events of %s yet: %s; the run continues",
                self._paths.root,
                error,
            )
        self._warned = True

    def finish(
        self,
        state: RunState,
        *,
        message: str,
        fault: RunFault | None,
        facts: Mapping[str, object],
        spec: RunSpec,
        pods: Sequence[Pod],
        world_size: int,
    ) -> None:
        """Write the result, then the last state.

        If the write fails, log the result and write it to the spare file.
        """
        self._write_late()
        if self._overflowed and not self._late:
            try:
                written = list(read_events(self._paths.events))
                self._fill(spec.job.traits.events, written, self._waiting)
            except OSError as error:  # the logs have the events
                self._warn(error)
        self._close_scalars()
        self._thin(_LAST_BYTES)
        try:
            self._samples.complete()
        except OSError as error:  # the result has the peaks as well
            self._warn(error)
        not_synced = self.sync()
        started_s = float(str(facts.get("started_s", now_s())))
        ended_s = now_s()
        duration_s = max(0.0, ended_s - started_s)
        figures, left_out = self._figures(started_s)
        message += left_out + not_synced
        versions = dict(pods[0].versions) if pods else {}
        hosts = []
        for pod in pods:
            host = HostSlots(address=pod.address, slots=pod.slots, pod=pod.name)
            hosts.append(host)
        raw = {
            **spec.job.views.facts,
            **submitted_rows(self._paths),
            "versions": versions,
            **figures,
            "duration_s": round(duration_s, 3),
            **facts,
            "state": state,
            "message": message,
            "error": fault,
            "hosts": hosts,
            "world_size": world_size,
            "ended_s": ended_s,
        }
        record = ResultRecord.at(self._paths.root, raw)
        result: Mapping[str, object] = self._redact.json(record.to_dict())
        late: Mapping[str, object] | None = None
        try:
            self._paths.reserve.unlink(missing_ok=True)
            write_json(self._paths.result, result)
        except OSError as error:
            logger.error(
                "cannot write the result of %s: %s; the result is %s",
                self._paths.root,
                error,
                result,
            )
            told = self._without_folder(result, error)
            if again := self._write_spare(told):
                logger.error("cannot write the result to %s either: %s", self._spare, again)
                late = result
            result = told
        self._write_late()
        self._change(state=state, message=message, hint="", wish="")
        # A notebook that has been told the result finds its file, and the last state.
        self.result, self._late_result = result, late

    def sync(self) -> str:
        """Write all files of the run to the disk, before a message or a cleared pod relies on them.

        Return a remark if the disk does not take a file, otherwise an empty string.
        """
        try:
            records.sync_below(self._paths.root)
        except OSError as error:
            self.is_synced = False
            logger.error("cannot sync %s: %s", self._paths.root, error)
            return f"; files of the run may not be on the disk ({error.strerror or error})"
        self.is_synced = True
        return ""

    def _figures(self, started_s: float) -> tuple[Mapping[str, object], str]:
        """Return the figures of the events, and a remark if the sum fails.

        Every run needs a result.
        """
        try:
            totals = RunTotals.of(read_events(self._paths.events))
            facts = totals.facts(started_s)
            if gpus := self._samples.gpus.uses:
                facts["gpus"] = [asdict(gpu) for gpu in gpus]
            return facts, ""
        except Exception as error:  # printed events may hold any values
            logger.exception("the figures of %s", self._paths.root)
            remark = (
                f"; the figures of the run are missing: {self._paths.events} "
                f"cannot be summed up ({type(error).__name__})"
            )
            return {}, remark

    def _without_folder(self, result: Mapping[str, object], error: OSError) -> Mapping[str, object]:
        """Return the result with the reason why the run's folder lacks the result."""
        reason = error.strerror or error
        why = f"{self._paths.root} could not take the result ({reason})"
        return {
            **result,
            "message": f"{result['message']}; {why}",
            "of": str(self._paths.root),
        }

    def _write_spare(self, result: Mapping[str, object]) -> str:
        """Write the result to the spare file. Return why that is impossible, or an empty string."""
        if self._spare is None:
            return "there is no other place"
        try:
            self._spare.parent.mkdir(mode=0o700, exist_ok=True)
            write_json(self._spare, result)
        except (OSError, WorkbenchError) as error:
            return str(error)
        return ""

    def finish_in_memory(self, state: RunState, message: str) -> None:
        """Keep a result that no file can take, for requests to the keeper, until `keep`."""
        self.result = {
            "state": state,
            "message": message,
            "of": str(self._paths.root),
        }
        self._late_result = self._redact.json({"state": state, "message": message})
        self._change(state=state, message=message, hint="", wish="")

    def amend(self, remark: str, facts: Mapping[str, object] | None = None) -> None:
        """Add a remark and figures to the result of a run that has ended."""
        self.sync()
        result = read_json(self._paths.result)
        if not remark or not result:
            return
        message = self._redact(f"{result.get('message')}; {remark}")
        self._rewrite({**result, **(facts or {})}, {"message": message})

    def mend(self, message: str, facts: Mapping[str, object]) -> None:
        """Mark a run as succeeded if only its results were missing."""
        self.sync()
        result = {**read_json(result_file(self._paths)), **facts, "error": None}
        self._rewrite(result, {"state": RunState.SUCCEEDED, "message": message})

    def _rewrite(self, result: Mapping[str, object], outcome: Mapping[str, object]) -> None:
        write_json(self._paths.result, {**result, **outcome})
        write_json(self._paths.state, {**read_json(self._paths.state), **outcome})

    def _close_scalars(self) -> None:
        try:
            if self._curves_broken:
                self._draw_anew(read_events(self._paths.events))
            self._scalars.close()
        except Exception as error:  # the result must be written, even without curves
            logger.warning("the curves of %s are incomplete: %s", self._paths.root, error)

    def _change(self, **changes: object) -> None:
        self._now |= changes
        content = {**self._now, "time_s": now_s()}
        try:
            self._state_file.write(self._redact.json(content))
            self._late_state = False
        except OSError as error:
            self._late_state = True
            logger.warning("cannot write the state of %s: %s", self._paths.root, error)


def _is_restart(event: Event) -> bool:
    """Whether an event is the keeper's own report of a restart."""
    return event.output is None and event.kind == EventKind.RESTARTED


def _end_at_last_line(paths: RunPaths) -> None:
    """Remove an unfinished last line from the events."""
    descriptor = records.open_file(paths.events, os.O_RDWR | os.O_CREAT)
    with os.fdopen(descriptor, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            block = file.read(end - start)
            at = block.rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _append(paths: RunPaths, data: bytes) -> None:
    """Append all data to the events, or none. Raise OSError on failure."""
    with records.open_to_append(paths.events) as out:
        size = out.seek(0, os.SEEK_END)
        try:
            records.write_all(out, data)
        except OSError:
            out.truncate(size)
            raise
