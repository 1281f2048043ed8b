"""The life of a run as states. `step` needs no process: the runner acts, and reports facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from workbench.keeper.decisions import RunDecisions
from workbench.keeper.run.policy import AttemptEnd, Loss, Outcome, judge, loss_of
from workbench.rundir.events import Event
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState


class Phase(StrEnum):
    """Where a run stands. Every phase has one action of the runner, in `ACTIONS`."""

    QUEUED = "queued"
    FINDING = "finding"
    """A keeper has died, and ranks of the attempt may be alive."""
    ENDING = "ending"
    """A keeper has died after the decision to restart."""
    PREPARING = "preparing"
    STAGED = "staged"
    """All pods are prepared for the attempt. A restart counts from now on."""
    RUNNING = "running"
    RESTARTING = "restarting"
    BRINGING = "bringing"
    WRITING = "writing"
    CLEARING = "clearing"
    """The result is written, and the pods may be cleared."""
    ENDED = "ended"
    """The result is written, and the pods may have files of the run."""
    CLEARED = "cleared"
    WITHDRAWN = "withdrawn"

    @property
    def is_terminal(self) -> bool:
        """Whether the run has its result, so that no rank starts again."""
        return self in (Phase.CLEARING, Phase.ENDED, Phase.CLEARED, Phase.WITHDRAWN)

    @property
    def is_before_ranks(self) -> bool:
        """Whether no rank of the attempt is known to have started."""
        return self in (Phase.QUEUED, Phase.FINDING, Phase.ENDING, Phase.PREPARING)


ACTIONS: Mapping[Phase, str] = {
    Phase.QUEUED: "wait for free pods",
    Phase.FINDING: "ask the agents for the ranks",
    Phase.ENDING: "end ranks of the lost attempt",
    Phase.PREPARING: "prepare all pods",
    Phase.STAGED: "start the ranks",
    Phase.RUNNING: "follow the ranks, then end them",
    Phase.RESTARTING: "replace lost pods, choose a checkpoint",
    Phase.BRINGING: "copy the outputs back",
    Phase.WRITING: "write the result",
    Phase.CLEARING: "clear the pods",
    Phase.ENDED: "none",
    Phase.CLEARED: "none",
    Phase.WITHDRAWN: "none",
}


class FactKind(StrEnum):
    """What the runner reports after an action. `Outcome` has the meanings of an attempt's end."""

    TURN = "turn"
    """Pods are free."""
    WITHDRAWN = "withdrawn"
    """The run was cancelled before its start."""
    FOUND = "ranks found"
    FOUND_LATER = "ranks of a later attempt found"
    """The dead keeper could not write the rows of the attempt: its disk was full."""
    NONE_FOUND = "no ranks found"
    RANKS_ENDED = "ranks ended"
    PREPARED = "pods prepared"
    STARTED = "ranks started"
    READY = "ready for another attempt"
    BROUGHT = "outputs copied"
    NOT_BROUGHT = "outputs not copied"
    WRITTEN = "result written"
    """No file of the run is missing here or on the disk."""
    WRITTEN_APART = "result written, files missing"
    EMPTIED = "pods cleared"
    KEPT = "files left on pods"
    FETCHED = "files fetched"
    BROKEN = "error of the keeper"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact that moves a run from one phase to the next."""

    kind: FactKind | Outcome
    end: AttemptEnd | None = None
    """End of an attempt. The failure policy replaces `kind` then."""
    fault: RunFault | None = None
    """Fault of the run, for `Outcome.OVER` and `NOT_BROUGHT`."""
    attempt: int = 0
    """Number of the attempt that was found."""
    restart: int = 0
    """Number of restarts before the attempt that was found."""
    event: Event | None = None
    """Event of the restart, for `READY`."""
    ended_as: RunState | None = None
    """Final state of the run, for facts that end the run."""
    message: str = ""
    """Final message of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State of a run. Everything that decides the next step."""

    phase: Phase = Phase.QUEUED
    attempt: int = 1
    """Number of the attempt, from 1."""
    restart: int = 0
    """Number of restarts so far."""
    restarts: int = 0
    """Number of restarts that the job allows."""
    first: int = 1
    """Number of the first attempt after the last restart. A later one was repeated for a port."""
    is_brought: bool = False
    """Whether the outputs were copied back, so that no attempt may follow."""
    loss: Loss | None = None
    """Loss before the next attempt, until its pods are prepared."""
    suspects: Sequence[str] = ()
    """Names of the pods to reconnect or replace before the next attempt."""
    event: Event | None = None
    """Event of the restart, until the pods are prepared."""
    fault: RunFault | None = None
    """Fault of the last attempt."""


_D = DecisionKind
_P = Phase
_F = FactKind
_Row = tuple[Phase, tuple[DecisionKind, ...]]
# An attempt that ends before its ranks start leaves nothing on the pods.
TRANSITIONS: Mapping[tuple[Phase, FactKind | Outcome], _Row] = {
    (_P.QUEUED, _F.TURN): (_P.PREPARING, ()),
    (_P.FINDING, _F.FOUND): (_P.RUNNING, ()),
    (_P.FINDING, _F.FOUND_LATER): (_P.RUNNING, (_D.STAGED, _D.STARTED)),
    (_P.FINDING, _F.NONE_FOUND): (_P.PREPARING, ()),
    (_P.FINDING, Outcome.LOST): (_P.RESTARTING, (_D.RESTARTED,)),
    (_P.FINDING, Outcome.OVER): (_P.BRINGING, ()),
    (_P.ENDING, _F.RANKS_ENDED): (_P.RESTARTING, ()),
    (_P.ENDING, Outcome.OVER): (_P.BRINGING, ()),
    (_P.PREPARING, _F.PREPARED): (_P.STAGED, (_D.STAGED,)),
    (_P.PREPARING, Outcome.PORT_TAKEN): (_P.PREPARING, ()),
    (_P.PREPARING, Outcome.LOST): (_P.RESTARTING, (_D.RESTARTED,)),
    (_P.PREPARING, Outcome.OVER): (_P.WRITING, ()),
    (_P.STAGED, _F.STARTED): (_P.RUNNING, (_D.STARTED,)),
    (_P.STAGED, Outcome.PORT_TAKEN): (_P.PREPARING, ()),
    (_P.STAGED, Outcome.LOST): (_P.RESTARTING, (_D.RESTARTED,)),
    (_P.STAGED, Outcome.OVER): (_P.BRINGING, ()),
    (_P.RUNNING, Outcome.PORT_TAKEN): (_P.PREPARING, ()),
    (_P.RUNNING, Outcome.LOST): (_P.RESTARTING, (_D.RESTARTED,)),
    (_P.RUNNING, Outcome.OVER): (_P.BRINGING, ()),
    (_P.RESTARTING, _F.READY): (_P.PREPARING, ()),
    (_P.RESTARTING, Outcome.OVER): (_P.BRINGING, ()),
    (_P.BRINGING, _F.BROUGHT): (_P.WRITING, (_D.BROUGHT,)),
    (_P.BRINGING, _F.NOT_BROUGHT): (_P.WRITING, ()),
    (_P.WRITING, _F.WRITTEN): (_P.CLEARING, (_D.ENDED,)),
    (_P.WRITING, _F.WRITTEN_APART): (_P.ENDED, (_D.ENDED,)),
    (_P.CLEARING, _F.EMPTIED): (_P.CLEARED, (_D.CLEARED,)),
    (_P.CLEARING, _F.KEPT): (_P.ENDED, ()),
    (_P.ENDED, _F.FETCHED): (_P.ENDED, ()),
}
"""Next phase and decisions by phase and fact. `_ANYWHERE` has the facts of every phase."""
_ANYWHERE: Mapping[FactKind | Outcome, _Row] = {
    _F.WITHDRAWN: (_P.WITHDRAWN, (_D.WITHDRAWN,)),
    _F.BROKEN: (_P.ENDED, (_D.ENDED,)),
}


def step(state: State, fact: Fact) -> tuple[State, Sequence[DecisionKind]]:
    """Return the state after a fact, and the decisions to write before its action.

    A terminal state ignores all facts that its rows do not name.

    Raises:
        ValueError: The fact has no meaning in the state.

    Example:
        >>> state, decisions = step(State(phase=Phase.STAGED), Fact(kind=FactKind.STARTED))
        >>> state.phase.value, [decision.value for decision in decisions]
        ('running', ['started'])
    """
    kind = fact.kind
    fault = fact.fault
    if fact.end is not None:
        can_restart = state.restart < state.restarts and not state.is_brought
        can_repeat = state.attempt == state.first
        kind = judge(fact.end, can_restart=can_restart, can_repeat=can_repeat)
        fault = fact.end.fault
    row = TRANSITIONS.get((state.phase, kind))
    if row is None and state.phase.is_terminal:
        return state, ()
    row = row or _ANYWHERE.get(kind)
    if row is None:
        raise ValueError(f"a run that is {state.phase} has no step for the fact: {kind}")
    phase, decisions = row
    state = replace(state, phase=phase)
    match kind:
        case _F.FOUND | _F.FOUND_LATER:
            state = replace(state, attempt=fact.attempt, restart=fact.restart)
        case Outcome.LOST:
            assert fact.end is not None
            attempt = state.attempt + 1
            loss = loss_of(fact.end)
            assert loss is not None
            state = replace(
                state,
                attempt=attempt,
                first=attempt,
                restart=state.restart + 1,
                loss=loss,
                suspects=loss.pods,
                event=None,
                fault=fault,
            )
        case Outcome.PORT_TAKEN:
            state = replace(state, attempt=state.attempt + 1)
        case Outcome.OVER | _F.NOT_BROUGHT:
            state = replace(state, fault=fault)
        case _F.READY:
            state = replace(state, event=fact.event, fault=None)
        case _F.PREPARED:
            state = replace(state, loss=None, suspects=(), event=None)
        case _F.BROUGHT | _F.FETCHED:
            state = replace(state, is_brought=True)
    return state, decisions


def recovered(decided: RunDecisions | None, *, restarts: int, counted: int = 0) -> State:
    """Return the state from which a new keeper continues a run.

    Args:
        decided: State of the run in the log of decisions. None: there is no log.
        restarts: Number of restarts that the job allows.
        counted: Number of restarts among the run's events, for a log without an attempt.
    """
    if decided is None or (not decided.attempt and not decided.over):
        return State(phase=Phase.FINDING, restart=counted, restarts=restarts)
    state = State(
        phase=Phase.FINDING,
        attempt=decided.attempt,
        restart=decided.restart,
        restarts=restarts,
        first=decided.first,
        is_brought=decided.brought,
    )
    if decided.over:
        return replace(state, phase=Phase(decided.last))
    if decided.loss is None:
        return state
    loss = Loss.read(decided.loss)
    # Any pod may have been lost since the decision.
    return replace(state, phase=Phase.ENDING, loss=loss, suspects=decided.pods, fault=loss.fault)
