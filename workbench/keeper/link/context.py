"""What a run is carried out with: the pods that the keeper hands it, and what people ask of it meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from workbench.base.errors import WorkbenchError
from workbench.base.files import read_text, write_text
from workbench.base.process import RankPlace
from workbench.base.redact import Redactor
from workbench.keeper.launch import place_ranks
from workbench.keeper.link.agent import AgentLink
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod
from workbench.pods.ssh.identity import Identity
from workbench.rundir.paths import PodRunPaths, RunPaths
from workbench.rundir.spec import RunSpec

logger = logging.getLogger(__name__)
_STACKS_S = 10.0  # the agent itself waits 2 s for its ranks
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    run_id: str
    paths: RunPaths
    spec: RunSpec
    identity: Identity
    look: Callable[[], Sequence[Pod]]
    restore: Callable[[Collection[str]], Mapping[str, str]] = lambda lost: dict.fromkeys(lost, "")
    """Has lost pods answer again, or others in their place; returns why not, by name, of those that stay lost."""
    restart: int = 0
    """How often it has gone on after a loss."""
    links: Sequence[AgentLink] = ()
    """Open links to the pods of this run, in rank order."""
    places: Sequence[RankPlace] = ()
    hostfile_sha256: str = ""
    """Of the run's hostfile as the keeper wrote it."""
    redact: Redactor = field(default_factory=Redactor)
    spare: Path | None = None
    """Where its result goes if its directory cannot take it."""
    left: bool = False
    """Whether a keeper that died had the run before."""
    unstartable: str = ""
    """Why its ranks cannot be started here, where they have not been; empty where they can."""
    restarted: bool = False
    """Whether its pods were on this machine, which has been started again since."""

    def on(self, links: Sequence[AgentLink]) -> RunContext:
        """Return the same on these pods, and write its hostfile."""
        pods = [link.pod for link in links]
        hostfile = Hostfile.from_pods(pods)
        if not _holds(
            self.paths.hostfile, str(hostfile)
        ):  # a full disk must not end a run that is under way
            write_text(self.paths.hostfile, str(hostfile))
        places = place_ranks(pods)
        places = places[: self.spec.job.ranks(len(places))]
        return replace(self, links=links, places=places, hostfile_sha256=hostfile.sha256)

    def on_pod(self, link: AgentLink) -> PodRunPaths:
        return PodRunPaths.of(link.pod.root, self.run_id)

    def ranks_on(self, link: AgentLink) -> list[int]:
        return [place.rank for place in self.places if place.pod == link.pod.name]

    def everywhere(self, action: Callable[[AgentLink], _T]) -> list[_T]:
        """Do something with all pods at once; return the results in rank order."""
        with ThreadPoolExecutor(max_workers=max(1, len(self.links))) as pool:
            return list(pool.map(action, self.links))

    def stacks(self) -> dict[int, str]:
        """Ask every rank where it is; "" for one that cannot tell."""

        def one(link: AgentLink) -> dict[str, str]:
            try:
                stacks: dict[str, str] = link.call("stacks", timeout_s=_STACKS_S, run=self.run_id)[
                    "stacks"
                ]
            except WorkbenchError as error:
                logger.warning("%s", error)
                return {}
            return stacks

        answers = {
            int(rank): text for answer in self.everywhere(one) for rank, text in answer.items()
        }
        return {place.rank: answers.get(place.rank, "") for place in self.places}


def _holds(path: Path, content: str) -> bool:
    with suppress(OSError):
        return read_text(path) == content
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What people have asked of a run since it was submitted."""

    cancel: threading.Event = field(default_factory=threading.Event)
    """To end now."""
    stop: threading.Event = field(default_factory=threading.Event)
    """To end within two steps, with its model."""
