"""Context of a run: the assigned pods, settings, and requests from users."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from workbench.base.errors import RunError, WorkbenchError
from workbench.base.files import write_text
from workbench.base.files.records import try_read
from workbench.base.process import RankPlace
from workbench.base.redact import Redactor
from workbench.base.words import truncate
from workbench.keeper.decisions import DecisionLog, RunDecisions
from workbench.keeper.launch import place_ranks
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.resource_limits import in_threads
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.checkpoints import shared_run
from workbench.rundir.paths import PodRunPaths, RunPaths
from workbench.rundir.register.store import DecisionKind
from workbench.rundir.spec import RunSpec

logger = logging.getLogger(__name__)
_STACKS_S = 10.0  # The agent itself waits 2 s for its ranks.
_STACK_LETTERS = 256 << 10
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    run_id: str
    paths: RunPaths
    spec: RunSpec
    identity: Identity
    refresh: Callable[[], Sequence[Pod]]
    restore: Callable[[Collection[str]], Mapping[str, str]] = lambda lost: dict.fromkeys(lost, "")
    """Function that reconnects or replaces lost pods. Returns the reason for pods still lost."""
    restart: int = 0
    """Number of restarts so far."""
    attempt: int = 1
    """Number of the attempt, from 1. The pods are prepared once for each attempt."""
    log: DecisionLog | None = None
    """Log of the keeper's decisions. None: a dry run, which decides nothing."""
    links: Sequence[AgentLink] = ()
    """Open links to the pods of the run, in rank order."""
    places: Sequence[RankPlace] = ()
    hostfile_sha256: str = ""
    """SHA-256 of the hostfile as the keeper wrote it."""
    redact: Redactor = field(default_factory=Redactor)
    spare: Path | None = None
    """File for the result if the run directory cannot be written. None: no such file."""
    inherited: bool = False
    """Whether the run was taken over from a dead keeper."""
    unstartable: str = ""
    """Reason why ranks cannot be started here. Empty: ranks can be started."""
    store_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the notebook with the credentials of the job's object store.

    Kept in memory only. Empty: the variables of this process are used.
    """
    restarted: bool = False
    """Whether the pods were on this machine and the machine was rebooted since."""

    def on(self, links: Sequence[AgentLink]) -> RunContext:
        """Return a copy of the context for the given pods, and write the run's hostfile."""
        pods = [link.pod for link in links]
        hostfile = Hostfile.from_pods(pods)
        content = str(hostfile)
        # Skip the write if unchanged, so that a full disk does not end a running job.
        if not _holds(self.paths.hostfile, content):
            write_text(self.paths.hostfile, content)
        places = place_ranks(pods)
        count = self.spec.job.rules.capped(len(places))
        return replace(
            self,
            links=links,
            places=places[:count],
            hostfile_sha256=hostfile.sha256,
        )

    @property
    def decided(self) -> RunDecisions | None:
        """State of the run in the log of decisions. None: the log does not know the run."""
        return None if self.log is None else self.log.of(self.run_id)

    @property
    def shared(self) -> RunPaths | None:
        """The run's folder in a folder that all pods share. None: checkpoints are elsewhere."""
        return shared_run(self.paths)

    @property
    def may_have_ranks(self) -> bool:
        """Whether ranks of a dead keeper may be alive, as its log says or as it wrote no log."""
        decided = self.decided
        return self.inherited and (decided is None or decided.attempt > 0)

    def decide(self, what: DecisionKind, **facts: object) -> None:
        """Record a decision about the run and its attempt. Raises nothing for a full disk."""
        if self.log is not None:
            self.log.add(self.run_id, what, self.attempt, **facts)

    def on_pod(self, link: AgentLink) -> PodRunPaths:
        return PodRunPaths.of(link.pod.root, self.run_id)

    def folder_on(self, link: AgentLink) -> PurePosixPath:
        """Return the folder on a pod in which the ranks of a script start."""
        return self.on_pod(link).script / self.spec.job.folder_name

    def ranks_on(self, link: AgentLink) -> list[int]:
        return [place.rank for place in self.places if place.pod == link.pod.name]

    def everywhere(self, action: Callable[[AgentLink], _T]) -> list[_T]:
        """Call a function for all pods in parallel. Return the results in rank order."""
        return in_threads(action, self.links)

    def stacks(self, *, lenient: bool = False) -> dict[int, str]:
        """Return the stack of every rank. Empty if a rank does not answer.

        Raise RunError for an answer of another form. With `lenient`, the pod counts as silent.
        """

        def one(link: AgentLink) -> dict[int, str]:
            try:
                answer = link.call("stacks", timeout_s=_STACKS_S, run=self.run_id)
                return _stacks_in(answer, link.pod.name, self.ranks_on(link))
            except WorkbenchError as error:
                if isinstance(error, RunError) and not lenient:
                    raise
                logger.warning("%s", error)
                return {}

        stacks = {place.rank: "" for place in self.places}
        for answer in self.everywhere(one):
            stacks.update(answer)
        return stacks


def _stacks_in(answer: Mapping[str, object], pod: str, ranks: Collection[int]) -> dict[int, str]:
    """Return the stacks in an answer of an agent. Raise RunError for any other form."""
    ranks_by_name = {str(rank): rank for rank in ranks}
    by_name = answer.get("stacks")
    stacks: dict[int, str] = {}
    if isinstance(by_name, Mapping):
        for name, text in by_name.items():
            if name not in ranks_by_name or not isinstance(text, str):
                break
            stacks[ranks_by_name[name]] = truncate(text, _STACK_LETTERS)
        else:
            return stacks
    raise RunError(
        f"the agent of {pod} sent no list of stacks by rank; the run continues. "
        "If the pod is trusted, start another cluster"
    )


def _holds(path: Path, content: str) -> bool:
    return try_read(path) == content.encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequests:
    """Requests from users since the run was submitted."""

    cancel: threading.Event = field(default_factory=threading.Event)
    """Set to end the run now."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the run within two steps and save the model."""
