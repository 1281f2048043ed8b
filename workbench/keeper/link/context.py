"""What a run is carried out with: the pods that the keeper hands it, and what people ask of it meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from workbench.base.errors import WorkbenchError
from workbench.base.redact import Redactor
from workbench.keeper.launch.command import RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import PodRunPaths, RunPaths
from workbench.rundir.spec import RunSpec

__all__ = ["RunContext", "Wishes"]

logger = logging.getLogger(__name__)
_STACKS_S = 10.0  # the agent itself waits 2 s for its ranks
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What the keeper hands to a run."""

    run_id: str
    paths: RunPaths
    spec: RunSpec
    links: Sequence[AgentLink]
    """Open links to the pods of this run, in rank order."""
    places: Sequence[RankPlace]
    identity: Identity
    hostfile_sha256: str
    """Of the run's hostfile as it was written when the run was submitted."""
    look: Callable[[], Sequence[Pod]]
    redact: Redactor = field(default_factory=Redactor)

    spare: Path | None = None
    """Where its result goes if its directory cannot take it."""
    left: bool = False
    """Whether a keeper that died had the run before."""
    unstartable: str = ""
    """Why its ranks cannot be started here, where they have not been; empty where they can."""

    def on_pod(self, link: AgentLink) -> PodRunPaths:
        """Return where the run lies on a pod."""
        return PodRunPaths.of(link.pod.root, self.run_id)

    def everywhere(self, action: Callable[[AgentLink], _T]) -> list[_T]:
        """Do something with all pods at once; return the results in rank order."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.links))) as pool:
            return list(pool.map(action, self.links))

    def stacks(self) -> dict[int, str]:
        """Ask every rank where it is; "" for one that cannot tell."""

        def one(link: AgentLink) -> dict[str, str]:
            try:
                stacks: dict[str, str] = link.call("stacks", timeout_s=_STACKS_S, run=self.run_id)["stacks"]
            except WorkbenchError as error:
                logger.warning("%s", error)
                return {}
            return stacks

        answers = {int(rank): text for answer in self.everywhere(one) for rank, text in answer.items()}
        return {place.rank: answers.get(place.rank, "") for place in self.places}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What people have asked of a run since it was submitted."""

    cancel: threading.Event = field(default_factory=threading.Event)
    """To end now."""
    stop: threading.Event = field(default_factory=threading.Event)
    """To end after the step in progress, with its model."""
