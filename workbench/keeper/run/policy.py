"""The failure policy: what the end of an attempt means for its run."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from workbench.base.clock import now_s
from workbench.base.json_values import Json, as_float, as_list, as_str
from workbench.keeper.watch.ledger import RunLedger
from workbench.rundir.outcome import first_cause, only_echoes
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.result import RunFault
from workbench.rundir.state import RunState

_KILLED = ("killed by SIGKILL", "killed by SIGTERM")
"""Exact messages. A longer message (out of memory) means a job that would fail again."""
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


class Outcome(StrEnum):
    """Outcome of an action that is no decision."""

    READY = "ready"
    """The next action can begin."""
    OVER = "over"
    """No attempt follows, or nothing is left to do."""
    UNSTARTED = "unstarted"
    """No attempt follows, and no attempt was ever prepared, so the pods have no outputs."""
    PORT_TAKEN = "port taken"
    """Another process has the port of torch's rendezvous. The attempt is repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """End of an attempt, with all that decides its meaning."""

    fault: RunFault | None = None
    """None: the ranks finished, or were asked to end."""
    lost: Collection[str] = ()
    """Names of the pods that are lost."""
    port: int = 0
    """Port of torch's rendezvous. 0: no port was chosen."""
    has_trained: bool = False
    is_unwanted: bool = False
    """Whether a user has asked the run to end."""
    time_s: float = 0.0
    """Time of the end, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Loss of an attempt that another attempt follows."""

    what: str
    """Lost part, such as "pod-2 was lost"."""
    why: str
    """Fate of the lost part."""
    pods: Sequence[str]
    """Names of the lost pods."""
    lost_s: float
    """Time of noticing the loss, in seconds since 1970."""

    def to_facts(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def read(cls, facts: Json) -> Loss:
        """Read the facts of a log. A missing fact has an empty value."""
        return cls(
            what=as_str(facts.get("what")),
            why=as_str(facts.get("why")),
            pods=[as_str(name) for name in as_list(facts.get("pods"))],
            lost_s=as_float(facts.get("lost_s")) or now_s(),
        )

    @property
    def fault(self) -> RunFault:
        """Fault of a run that cannot continue after the loss."""
        pod = self.pods[0] if self.pods else ""
        return RunFault(kind="pod", pod=pod, message=self.why or self.what)


def judge(end: AttemptEnd, *, can_restart: bool, can_repeat: bool) -> Outcome | DecisionKind:
    """Decide what follows an attempt: nothing, a restart after a loss, or the attempt again.

    `can_restart`: a restart is left. `can_repeat`: no attempt was repeated for its port yet.
    """
    if can_repeat and _port_was_taken(end):
        return Outcome.PORT_TAKEN
    if can_restart and not end.is_unwanted and loss_of(end) is not None:
        return DecisionKind.RESTARTED
    return Outcome.OVER


def loss_of(end: AttemptEnd) -> Loss | None:
    """Describe the loss that ended an attempt. None: the job itself ended the attempt.

    Example:
        >>> fault = RunFault(kind="signal", rank=1, pod="pod-1", message="killed by SIGKILL")
        >>> loss_of(AttemptEnd(fault=fault)).what
        'rank 1 on pod-1 was killed by SIGKILL'
    """
    fault = end.fault
    if fault is None:
        return None
    lost = set(end.lost)
    if fault.kind == "pod":
        lost.add(fault.pod)
    pods = sorted(lost)
    if pods:
        what = f"{' and '.join(pods)} {'was' if len(pods) == 1 else 'were'} lost"
    elif fault.kind == "signal" and fault.message in _KILLED:
        what = f"rank {fault.rank} on {fault.pod} was {fault.message}"
    else:
        return None
    return Loss(what=what, why=fault.message, pods=pods, lost_s=end.time_s)


def _port_was_taken(end: AttemptEnd) -> bool:
    """Whether the error names the port of torch's rendezvous, and says that the port is taken."""
    if end.fault is None or not end.port or end.has_trained:
        return False
    words = f"{end.fault.message}\n{end.fault.traceback}"
    if str(end.port) not in re.findall(r"\d+", words):
        return False
    return _PORT_TAKEN.search(words) is not None


def blame(ledger: RunLedger, *, unwatched: bool, rebooted: bool) -> RunFault | None:
    """Return the fault of failed ranks. None: the ranks only lost a peer on a lost pod."""
    ranks = ledger.ranks.values()
    if only_echoes(ranks):
        if unwatched:
            return stopped_by_others(ledger, unwatched=True, rebooted=rebooted)
        if ledger.lost:
            return None
    return first_cause(ranks)


def stopped_by_others(ledger: RunLedger, *, unwatched: bool, rebooted: bool) -> RunFault:
    """Build the fault for a rank that ended with its agent.

    `unwatched`: no keeper was running. `rebooted`: the machine of the pods was rebooted meanwhile.
    """
    stopped = next(rank for rank in ledger.ranks.values() if not rank.done)
    why = "was ended together with the agent of the pod, not by the keeper of the run"
    if unwatched:
        why = (
            "was ended after the death of the keeper:"
            " no new keeper came within the lease of the pod's agent"
        )
        if rebooted:
            why = "ended with the pod when this machine was rebooted"
    return RunFault(
        host=stopped.pod.address,
        pod=stopped.pod.name,
        rank=stopped.rank,
        kind="pod",
        message=why,
    )


def final_state(ledger: RunLedger, fault: RunFault | None, *, asked_to_stop: bool) -> RunState:
    """Return the final state of a run.

    `asked_to_stop`: the run was asked to stop and was not cancelled later.
    """
    if fault is not None:
        return RunState.FAILED
    if ledger.all_done:
        stopped = ledger.totals.stopped_step is not None
        return RunState.STOPPED if stopped else RunState.SUCCEEDED
    if asked_to_stop and ledger.ranks and not ledger.forced:
        return RunState.STOPPED
    return RunState.CANCELLED
