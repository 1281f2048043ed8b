"""The faults of pairs: what causes each, and the words that name each as a cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, and what a run may say of it."""

    causes: Sequence[str]
    """Lower-case words, of which the cause of a failed run has one. Empty: never a cause."""
    signal: str = ""
    """Signal for the victims. Empty: the hook causes the fault within the keeper."""
    victims: Sequence[str] = ()
    """Kinds of `find_victims`."""
    halt: str = ""
    """How long the victims are stopped: `short` or `long`, measured by the lease."""
    outlived: bool = False
    """Whether a run is to succeed in spite of this fault alone."""
    seconds: float = 2.0
    """How long a fault within the keeper lasts."""
    folder: bool = False
    """Whether the run's folder takes no lines meanwhile."""
    launcher: str = "ssh"


_AGENT = ("the agent of", "the agent ended", "no sign from", "lost the line", "no line to")
_POD = ("no sign from pod", "was lost", "is failed", "lost the line", "the agent of", "no line to")
_KEEPER = ("keeper",)

FAULTS: Mapping[str, Fault] = {
    "descriptor": Fault(("too many open files", "errno 24", "descriptor", *_AGENT)),
    "thread": Fault(("start new thread", "start a thread", "limit of processes")),
    "readonly": Fault(("read-only",), folder=True),
    "full": Fault(("no space", "disk"), folder=True),
    "stale": Fault(("stale", "is gone", "cannot be read"), folder=True),
    "late": Fault(("did not answer", "does not answer", "no answer"), outlived=True, seconds=6.0),
    "kill-keeper": Fault(_KEEPER, "KILL", ("keeper",), outlived=True),
    "kill-agent": Fault(_AGENT, "KILL", ("agent",)),
    "kill-rank": Fault(("killed by sigkill",), "KILL", ("rank",)),
    "kill-pod": Fault(_POD, "KILL", ("worker",)),
    "kill-launcher": Fault(("launcher",), "KILL", ("launcher",), launcher="pdsh"),
    "cut-line": Fault((), "KILL", ("session",), outlived=True),
    "freeze-keeper": Fault((), "STOP", ("keeper",), "short", outlived=True),
    "freeze-keeper-long": Fault((*_AGENT, "lease", *_KEEPER), "STOP", ("keeper",), "long"),
    "freeze-agent": Fault((), "STOP", ("agent",), "short", outlived=True),
    "freeze-agent-long": Fault((*_AGENT, "lease"), "STOP", ("agent",), "long"),
    "freeze-all": Fault((), "STOP", ("keeper", "agent", "rank"), "short", outlived=True),
    "freeze-all-long": Fault(
        (*_AGENT, "lease", "signal", *_KEEPER), "STOP", ("keeper", "agent", "rank"), "long"
    ),
}


def words_for(names: Sequence[str]) -> Sequence[str]:
    """Return the words that are right for any of the faults.

    >>> words_for(["kill-rank", "full"])
    ['killed by sigkill', 'no space', 'disk']
    """
    return [word for name in names for word in FAULTS[name].causes]


def names_a_cause(names: Sequence[str], text: str) -> bool:
    """Whether a failure names a fault that was injected.

    >>> names_a_cause(["kill-rank", "full"], "signal: killed by SIGKILL")
    True
    >>> names_a_cause(["cut-line", "full"], "signal: killed by SIGKILL")
    False
    """
    return any(word in text.lower() for word in words_for(names))
