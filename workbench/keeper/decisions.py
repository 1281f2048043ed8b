"""Log of a keeper's decisions about its runs. A new keeper replays the log.

Every decision is a line of JSON in the user's private folder, appended and synced. A decision whose
line cannot be written stays in memory, and its line is written later, in order.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from workbench.base.clock import now_s
from workbench.base.files import gate, read_bytes, write_bytes
from workbench.base.files.gate import open_to_append, open_to_write, write_all
from workbench.base.json_values import Json, items, parse_record, part, text, whole
from workbench.base.redact import Redactor

logger = logging.getLogger(__name__)
# A cluster of ten thousand runs writes some ten MiB.
_LARGEST = 256 << 20
_RESERVE_BYTES = 64 << 10


class DecisionKind(StrEnum):
    """A decision about a run."""

    SUBMITTED = "submitted"
    """The keeper has accepted the run. Facts: path and pods."""
    STAGED = "staged"
    """Every pod is prepared for an attempt, and no rank has started. Facts: pods and restart."""
    STARTED = "started"
    """The ranks of the attempt have been started."""
    RESTARTED = "restarted"
    """Another attempt was decided after a loss. Facts: the loss, and number of the restart."""
    BROUGHT = "brought"
    """The outputs of the run have been copied back."""
    ENDED = "ended"
    """The run is over, and its result is written if a disk takes it. Facts: state and message."""
    CLEARED = "cleared"
    """The pods were cleared after the result."""
    WITHDRAWN = "withdrawn"
    """The run was cancelled before its start. Facts: state and message."""


_OVER = (DecisionKind.ENDED, DecisionKind.CLEARED, DecisionKind.WITHDRAWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A line of the log."""

    n: int
    """Number of the line, from 1 without gaps."""
    time_s: float
    run: str
    what: DecisionKind
    attempt: int = 0
    """Number of the attempt, from 1. 0: no attempt yet."""
    facts: Mapping[str, object] = field(default_factory=dict)

    def to_line(self) -> bytes:
        line = {
            "n": self.n,
            "time_s": round(self.time_s, 3),
            "run": self.run,
            "what": self.what,
            "attempt": self.attempt,
            **self.facts,
        }
        return (json.dumps(line, default=str) + "\n").encode()

    @classmethod
    def read(cls, raw: Json) -> Decision | None:
        """Read a line. Return None for a line that is no decision."""
        facts = dict(raw)
        number = whole(facts.pop("n", None))
        attempt = whole(facts.pop("attempt", None)) or 0
        run = text(facts.pop("run", None))
        time = facts.pop("time_s", None)
        try:
            what = DecisionKind(text(facts.pop("what", None)))
        except ValueError:
            return None
        if number is None or not run:
            return None
        time_s = float(time) if isinstance(time, int | float) else 0.0
        return cls(n=number, time_s=time_s, run=run, what=what, attempt=attempt, facts=facts)


@dataclass(slots=True)
class RunDecisions:
    """State of a run after all decisions so far."""

    run: str
    path: Path = Path()
    """Directory of the run."""
    last: DecisionKind = DecisionKind.SUBMITTED
    attempt: int = 0
    """Number of the last attempt, from 1. 0: no attempt yet."""
    started: bool = False
    """Whether ranks of the last attempt were started."""
    restart: int = 0
    """Number of restarts that were decided."""
    pods: Sequence[str] = ()
    """Names of the run's pods, in the order of ranks."""
    loss: Mapping[str, object] | None = None
    """Loss of a restart that was decided, until its pods are prepared. None: no such restart."""
    events: list[Mapping[str, object]] = field(default_factory=list)
    """Event of every restart whose pods were prepared, in order."""
    brought: bool = False
    outcome: Mapping[str, object] = field(default_factory=dict)
    """State and message of a run that is over."""

    @property
    def over(self) -> bool:
        """Whether the run has ended, so that no rank may start again."""
        return bool(self.outcome)

    def take(self, decision: Decision) -> None:
        """Apply the next decision. Nothing but `cleared` follows the end of a run."""
        if self.over:
            if decision.what is DecisionKind.CLEARED:
                self.last = DecisionKind.CLEARED
            return
        facts = decision.facts
        self.last = decision.what
        self.attempt = max(self.attempt, decision.attempt)
        match decision.what:
            case DecisionKind.SUBMITTED:
                self.path = Path(text(facts.get("path")))
                self.pods = _names(facts)
            case DecisionKind.RESTARTED:
                self.restart = max(self.restart, whole(facts.get("restart")) or 0)
                self.loss = part(facts, "loss")
                self.started = False
            case DecisionKind.STAGED:
                self.restart = max(self.restart, whole(facts.get("restart")) or 0)
                self.pods = _names(facts) or self.pods
                self.loss = None
                self.started = False
                event = part(facts, "event")
                if event:
                    self.events.append(event)
            case DecisionKind.STARTED:
                self.started = True
            case DecisionKind.BROUGHT:
                self.brought = True
        if decision.what in _OVER:
            self.outcome = {"state": "unknown", **facts}


def _names(facts: Json) -> list[str]:
    return [text(name) for name in items(facts.get("pods"))]


def replay(decisions: Iterable[Decision]) -> dict[str, RunDecisions]:
    """Return the state of every run, in the order of submission."""
    runs: dict[str, RunDecisions] = {}
    for decision in decisions:
        run = runs.setdefault(decision.run, RunDecisions(run=decision.run))
        run.take(decision)
    return runs


def read_decisions(path: Path) -> list[Decision]:
    """Read a log. A torn last line, a damaged line and a repeated line are left out.

    Return an empty list for a missing log. Raise OSError for a log that cannot be read.
    """
    try:
        data = read_bytes(path, limit=_LARGEST)
    except FileNotFoundError:
        return []
    decisions: list[Decision] = []
    # The part after the last line break is a line that was never finished.
    *lines, _ = data.split(b"\n")
    for line in lines:
        decision = _parsed(line)
        if decision is None:
            logger.warning("a line of %s is damaged and is left out", path)
        elif not decisions or decision.n > decisions[-1].n:
            decisions.append(decision)
    return decisions


def _parsed(line: bytes) -> Decision | None:
    try:
        raw = parse_record(line)
    except ValueError:
        return None
    return Decision.read(raw) if isinstance(raw, dict) else None


class DecisionLog:
    """Append decisions to the log of a cluster, and keep the state of its runs. Thread-safe."""

    def __init__(self, path: Path, redact: Redactor | None = None, reserves: Sequence[Path] = ()):
        """Write to `path`, after `replay` or `clear`.

        `reserves` are files to remove if the disk is full.
        """
        self._path = path
        self._redact = redact or Redactor()
        self._own_reserve = path.with_name(f".{path.name}.reserve")
        self._reserves = [self._own_reserve, *reserves]
        self._lock = threading.Lock()
        # All decisions of the cluster, to write the log again if another program removes it.
        self._known: list[Decision] = []
        self._late: list[Decision] = []
        self._is_late = False
        self._torn = True  # An earlier keeper may have died within a line.
        self._last_n = 0
        self._runs: dict[str, RunDecisions] = {}

    @property
    def runs(self) -> Mapping[str, RunDecisions]:
        """State of every run by id, in the order of submission."""
        with self._lock:
            return dict(self._runs)

    def of(self, run: str) -> RunDecisions | None:
        with self._lock:
            return self._runs.get(run)

    def reserve(self) -> None:
        """Reserve room on the disk for some hundred decisions. Failures are logged."""
        try:
            write_bytes(self._own_reserve, bytes(_RESERVE_BYTES))
        except OSError as error:
            logger.warning("no room is kept for the decisions of the keeper: %s", error)

    def release(self) -> None:
        """Give the reserved room back. Raises nothing."""
        with suppress(OSError):
            gate.remove(self._own_reserve)

    def replay(self) -> None:
        """Continue the log of a dead keeper. Raise OSError for a log that cannot be read."""
        with self._lock:
            decisions = read_decisions(self._path)
            self._known = decisions
            self._last_n = decisions[-1].n if decisions else 0
            self._runs = replay(decisions)

    def clear(self) -> None:
        """Remove the log of an earlier cluster in the same directory. Raise OSError on failure."""
        with self._lock:
            gate.remove(self._path)
            self._known.clear()
            self._late.clear()
            self._runs.clear()
            self._last_n = 0

    def add(self, run: str, what: DecisionKind, attempt: int = 0, **facts: object) -> None:
        """Record a decision. A failed write is repeated later, and the run continues."""
        with self._lock:
            self._last_n += 1
            masked = self._redact.json(facts)
            if "path" in facts:
                # A new keeper needs the path as it is, and the log is private.
                masked["path"] = str(facts["path"])
            decision = Decision(
                n=self._last_n,
                time_s=now_s(),
                run=run,
                what=what,
                attempt=attempt,
                facts=masked,
            )
            self._runs.setdefault(run, RunDecisions(run=run)).take(decision)
            self._known.append(decision)
            self._late.append(decision)
            self._restore()
            self._write()

    def keep(self) -> None:
        """Write late decisions, or all if another program removed the log. Raises nothing."""
        with self._lock:
            self._restore()
            if self._late:
                self._write()

    def _restore(self) -> None:
        """Write all decisions again if the log was removed: a new keeper replays all of them."""
        is_removed = len(self._late) < len(self._known) and not os.path.lexists(self._path)
        if is_removed:
            logger.warning("%s was removed; all decisions are written again", self._path)
            self._late = list(self._known)
            self._torn = True
            self.reserve()

    def _write(self) -> None:
        data = b"".join(decision.to_line() for decision in self._late)
        try:
            self._append_or_free(data)
        except OSError as error:
            if not self._is_late:
                logger.warning(
                    "cannot write decisions to %s: %s; the runs continue, and the keeper tries "
                    "again every few seconds",
                    self._path,
                    error,
                )
            self._is_late = True
            return
        if self._is_late:
            logger.info("%d late decisions are written to %s", len(self._late), self._path)
        self._is_late = False
        self._late.clear()

    def _append_or_free(self, data: bytes) -> None:
        try:
            self._append(data)
        except OSError:
            # Free the reserved disk space for the log.
            if not self._free():
                raise
            self._append(data)

    def _free(self) -> bool:
        freed = False
        for reserve in self._reserves:
            if os.path.lexists(reserve):
                with suppress(OSError):
                    gate.remove(reserve)
                    freed = True
        return freed

    def _append(self, data: bytes) -> None:
        if self._torn:
            _end_at_last_line(self._path)
            self._torn = False
        with open_to_append(self._path, self._path.parent) as out:
            size = out.seek(0, os.SEEK_END)
            try:
                write_all(out, data)
                os.fsync(out.fileno())
            except OSError:
                # The lines are written again later, and must not be there twice.
                self._torn = True
                out.truncate(size)
                raise
        if size == 0:
            _sync_folder(self._path.parent)


def _end_at_last_line(path: Path) -> None:
    """Remove an unfinished last line."""
    handle = open_to_write(path, os.O_RDWR | os.O_CREAT, path.parent)
    with os.fdopen(handle, "r+b") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            file.truncate(end)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
