"""A keeper's pods and decisions about its runs. A new keeper replays those of the dead one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base.clock import now_s
from workbench.base.errors import RunError
from workbench.base.json_values import Json, as_int, as_list, as_str, get_object
from workbench.base.redact import Redactor
from workbench.rundir.register.store import (
    Contents,
    DamagedStore,
    Decision,
    DecisionKind,
    KnownRun,
    Registration,
    create_store,
    read_store,
    set_aside,
    write_store,
)

logger = logging.getLogger(__name__)
_OVER = (DecisionKind.ENDED, DecisionKind.CLEARED, DecisionKind.WITHDRAWN)


@dataclass(slots=True)
class RunDecisions:
    """State of a run after all decisions so far."""

    run: str
    path: Path = Path()
    """Directory of the run."""
    last: DecisionKind = DecisionKind.SUBMITTED
    attempt: int = 0
    """Number of the last attempt, from 1. 0: no attempt yet."""
    first: int = 1
    """Number of the first attempt after the last restart."""
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
                self.pods = _names(facts)
            case DecisionKind.RESTARTED:
                self.restart = max(self.restart, as_int(facts.get("restart")) or 0)
                self.first = self.attempt
                self.loss = get_object(facts, "loss")
                self.started = False
            case DecisionKind.STAGED:
                self.restart = max(self.restart, as_int(facts.get("restart")) or 0)
                self.pods = _names(facts) or self.pods
                self.loss = None
                self.started = False
                event = get_object(facts, "event")
                if event:
                    self.events.append(event)
            case DecisionKind.STARTED:
                self.restart = max(self.restart, as_int(facts.get("restart")) or 0)
                self.started = True
            case DecisionKind.BROUGHT:
                self.brought = True
        if decision.what in _OVER:
            self.outcome = {"state": "unknown", **facts}


def _names(facts: Json) -> list[str]:
    return [as_str(name) for name in as_list(facts.get("pods"))]


def replay(contents: Contents) -> dict[str, RunDecisions]:
    """Return the state of every run, in the order of submission."""
    runs = {run.id: RunDecisions(run=run.id, path=run.path) for run in contents.runs}
    for decision in contents.decisions:
        runs.setdefault(decision.run, RunDecisions(run=decision.run)).take(decision)
    return runs


class DecisionLog:
    """Keep the state of a cluster's runs, and write every decision to the store. Thread-safe.

    A decision that the store does not take stays in memory, and is written later, in order.
    """

    def __init__(self, path: Path, redact: Redactor | None = None):
        """Write to the store at `path`, after `replay`."""
        self._path = path
        self._redact = redact or Redactor()
        self._lock = threading.Lock()
        # All that was decided, to write the store again if another program removes it.
        self._decisions: list[Decision] = []
        self._written = 0
        self._pods: Sequence[Json] = ()
        self._written_pods: Sequence[Json] = ()
        self._is_late = False
        self.registration = Registration()
        """Entry of the cluster, after `replay`."""
        self._runs: dict[str, RunDecisions] = {}

    @property
    def runs(self) -> Mapping[str, RunDecisions]:
        """State of every run by id, in the order of submission."""
        with self._lock:
            return dict(self._runs)

    @property
    def pods(self) -> Sequence[Json]:
        """JSON form of the cluster's pods, in rank order."""
        with self._lock:
            return self._pods

    def of(self, run: str) -> RunDecisions | None:
        with self._lock:
            return self._runs.get(run)

    def replay(self) -> None:
        """Continue the store. A damaged store is set aside, and written again.

        Raises:
            RunError: The store cannot be read at the moment, has another format, or does not name
                the cluster.
        """
        with self._lock:
            contents = read_store(self._path)
            if contents.registration is None:
                raise RunError(
                    f"{self._path} does not name the cluster; start another with another path"
                )
            self.registration = contents.registration
            self._decisions = list(contents.decisions)
            self._written = len(self._decisions)
            self._pods = self._written_pods = contents.pods
            self._runs = replay(contents)
            if not contents.is_whole:
                set_aside(self._path)
                self._write()

    def add(self, run: str, what: DecisionKind, attempt: int = 0, **facts: object) -> None:
        """Record a decision. A failed write is repeated later, and the run continues.

        The fact `path` of a submission is the run's directory, and stays as it is: a new keeper
        needs the path. All other facts are masked.
        """
        path = facts.pop("path", None)
        decision = Decision(
            time_s=now_s(), run=run, what=what, attempt=attempt, facts=self._redact.json(facts)
        )
        with self._lock:
            known = self._runs.setdefault(run, RunDecisions(run=run))
            if path is not None:
                known.path = Path(str(path))
            known.take(decision)
            self._decisions.append(decision)
            self._write()

    def set_pods(self, pods: Sequence[Json]) -> None:
        """Replace the pods of the store, after `replay`. A failed write is repeated later."""
        with self._lock:
            if self.registration.path:
                self._pods = pods
                self._write()

    def keep(self) -> None:
        """Write late decisions, or all if another program removed the store. Raises nothing."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        is_written = self._written == len(self._decisions) and self._written_pods == self._pods
        if is_written and os.path.lexists(self._path):
            return
        try:
            try:
                self._append()
            except DamagedStore as error:
                logger.warning("%s; all decisions are written again", error)
                set_aside(self._path)
                self._append()
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
            logger.info("late decisions are written to %s", self._path)
        self._is_late = False

    def _append(self) -> None:
        if not os.path.lexists(self._path):
            logger.warning("%s was removed; all decisions are written again", self._path)
            runs = [KnownRun(id=run.run, path=run.path) for run in self._runs.values()]
            create_store(self._path, self.registration, runs, self._decisions, self._pods)
        else:
            late = self._decisions[self._written :]
            names = dict.fromkeys(decision.run for decision in late)
            write_store(
                self._path,
                runs=[KnownRun(id=name, path=self._runs[name].path) for name in names],
                decisions=late,
                first=self._written + 1,
                pods=None if self._pods == self._written_pods else self._pods,
            )
        self._written = len(self._decisions)
        self._written_pods = self._pods
