"""The life of a run as states. `step` needs no process: the runner acts, and reports facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from workbench.keeper.decisions import RunDecisions
from workbench.keeper.run.policy import AttemptEnd, Loss, Outcome, judge, loss_of
from workbench.rundir.events import Event
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault


class Phase(StrEnum):
    """Where a run stands. The first sentence of a phase is the action of the runner there."""

    QUEUED = "queued"
    """Wait for free pods."""
    FINDING = "finding"
    """Ask the agents for the ranks of a dead keeper."""
    ENDING = "ending"
    """End the ranks of the lost attempt. A keeper has died after the decision to restart."""
    PREPARING = "preparing"
    """Prepare all pods."""
    STAGED = "staged"
    """Start the ranks. A restart counts from now on."""
    RUNNING = "running"
    """Follow the ranks, then end them."""
    RESTARTING = "restarting"
    """Replace lost pods, and choose a checkpoint."""
    BRINGING = "bringing"
    """Copy the outputs back."""
    WRITING = "writing"
    """Write the result."""
    CLEARING = "clearing"
    """Clear the pods of a whole run."""
    ENDED = "ended"
    """Do nothing. The pods may have files of the run."""
    CLEARED = "cleared"
    """Do nothing. The pods have nothing of the run."""
    WITHDRAWN = "withdrawn"
    """Do nothing. No rank was started."""

    @property
    def is_terminal(self) -> bool:
        """Whether the run has its result, so that no rank starts again."""
        return self in (Phase.CLEARING, Phase.ENDED, Phase.CLEARED, Phase.WITHDRAWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A fact that moves a run from one phase to the next."""

    kind: Outcome | DecisionKind = Outcome.OVER
    """A decision is written to the store before the next action."""
    end: AttemptEnd | None = None
    """End of an attempt. The failure policy replaces `kind` then."""
    fault: RunFault | None = None
    """Fault of the run, for `Outcome.OVER`."""
    attempt: int = 0
    """Number of the attempt of the ranks that were found. 0: this keeper started the ranks."""
    restart: int = 0
    """Number of restarts before the attempt that was found."""
    event: Event | None = None
    """Event of a restart that is ready."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Further facts of the decision."""


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


_READY = Outcome.READY
_OVER = Outcome.OVER
_PORT_TAKEN = Outcome.PORT_TAKEN
_STARTED = DecisionKind.STARTED
_RESTARTED = DecisionKind.RESTARTED
TRANSITIONS: Mapping[Phase, Mapping[Outcome | DecisionKind, Phase]] = {
    Phase.QUEUED: {_READY: Phase.PREPARING},
    Phase.FINDING: {
        _STARTED: Phase.RUNNING,
        _READY: Phase.PREPARING,
        _RESTARTED: Phase.RESTARTING,
        _OVER: Phase.BRINGING,
    },
    Phase.ENDING: {_READY: Phase.RESTARTING, _OVER: Phase.BRINGING},
    Phase.PREPARING: {
        DecisionKind.STAGED: Phase.STAGED,
        _PORT_TAKEN: Phase.PREPARING,
        _RESTARTED: Phase.RESTARTING,
        Outcome.UNSTARTED: Phase.WRITING,
        # The pods have the outputs of an earlier attempt.
        _OVER: Phase.BRINGING,
    },
    Phase.STAGED: {
        _STARTED: Phase.RUNNING,
        _PORT_TAKEN: Phase.PREPARING,
        _RESTARTED: Phase.RESTARTING,
        _OVER: Phase.BRINGING,
    },
    Phase.RUNNING: {
        _PORT_TAKEN: Phase.PREPARING,
        _RESTARTED: Phase.RESTARTING,
        _OVER: Phase.BRINGING,
    },
    Phase.RESTARTING: {_READY: Phase.PREPARING, _OVER: Phase.BRINGING},
    Phase.BRINGING: {DecisionKind.BROUGHT: Phase.WRITING, _OVER: Phase.WRITING},
    Phase.WRITING: {DecisionKind.ENDED: Phase.CLEARING},
    Phase.CLEARING: {DecisionKind.CLEARED: Phase.CLEARED, _OVER: Phase.ENDED},
    # By a user's `run.fetch()`.
    Phase.ENDED: {DecisionKind.BROUGHT: Phase.ENDED},
}
"""Next phase by phase and fact. `ANYWHERE` has the facts of every phase that is not terminal."""
ANYWHERE: Mapping[Outcome | DecisionKind, Phase] = {
    DecisionKind.WITHDRAWN: Phase.WITHDRAWN,
    # An error of the keeper or of the run's folder.
    DecisionKind.ENDED: Phase.ENDED,
}


def step(state: State, fact: Fact) -> tuple[State, DecisionKind | None]:
    """Return the state after a fact, and the decision to write before its action.

    Raises:
        ValueError: The fact has no meaning in the state.

    Example:
        >>> state, decision = step(State(phase=Phase.STAGED), Fact(kind=DecisionKind.STARTED))
        >>> state.phase.value, decision.value
        ('running', 'started')
    """
    kind = fact.kind
    fault = fact.fault
    if fact.end is not None:
        can_restart = state.restart < state.restarts and not state.is_brought
        kind = judge(fact.end, can_restart=can_restart, can_repeat=state.attempt == state.first)
        fault = fact.end.fault
        if kind is Outcome.OVER and state.phase is Phase.PREPARING and state.attempt == 1:
            kind = Outcome.UNSTARTED
    rows = TRANSITIONS.get(state.phase, {})
    if not state.phase.is_terminal:
        rows = {**ANYWHERE, **rows}
    if kind not in rows:
        raise ValueError(f"no step follows {state.phase} for the fact {kind}")
    state = replace(state, phase=rows[kind])
    match kind:
        case DecisionKind.STAGED:
            state = replace(state, loss=None, suspects=(), event=None)
        case DecisionKind.STARTED if fact.attempt:
            state = replace(state, attempt=fact.attempt, restart=fact.restart)
        case DecisionKind.RESTARTED if fact.end is not None and (loss := loss_of(fact.end)):
            attempt = state.attempt + 1
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
        case DecisionKind.BROUGHT:
            state = replace(state, is_brought=True)
        case Outcome.PORT_TAKEN:
            state = replace(state, attempt=state.attempt + 1)
        case Outcome.OVER | Outcome.UNSTARTED:
            state = replace(state, fault=fault)
        case Outcome.READY:
            state = replace(state, event=fact.event)
    return state, kind if isinstance(kind, DecisionKind) else None


def recovered(decided: RunDecisions | None, *, restarts: int, counted: int = 0) -> State:
    """Return the state from which a new keeper continues a run.

    Args:
        decided: State of the run in the log of decisions. None: there is no log.
        restarts: Number of restarts that the job allows.
        counted: Number of restarts among the run's events, for a log without an attempt.
    """
    if decided is None or not (decided.attempt or decided.over):
        return State(phase=Phase.FINDING, restart=counted, restarts=restarts)
    state = State(
        phase=Phase(decided.last) if decided.over else Phase.FINDING,
        attempt=decided.attempt,
        restart=decided.restart,
        restarts=restarts,
        first=decided.first,
        is_brought=decided.brought,
    )
    if decided.over or decided.loss is None:
        return state
    loss = Loss.read(decided.loss)
    # Any pod may have been lost since the decision.
    return replace(state, phase=Phase.ENDING, loss=loss, suspects=decided.pods, fault=loss.fault)
