"""What a run is carried out with: the pods and plans that the keeper hands it, and what people ask of it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workbench.keeper.launch.command import LaunchPlan, RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.pods.pod import Pod
from workbench.rundir.paths import RunPaths
from workbench.rundir.spec import RunSpec

__all__ = ["RunContext", "Wishes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What the keeper hands to a run."""

    run_id: str
    """Id of the run."""
    paths: RunPaths
    """Its directory."""
    spec: RunSpec
    """What was asked."""
    links: Sequence[AgentLink]
    """Open links to the pods of this run, in rank order."""
    places: Sequence[RankPlace]
    """All ranks."""
    plan: Callable[[int], LaunchPlan]
    """Gives the launch plan for a master port."""
    look: Callable[[], Sequence[Pod]]
    """Asks the backend for the pods as they are now."""
    lease_s: float = 120.0
    """The agents' lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What people have asked of a run since it was submitted."""

    cancel: threading.Event = field(default_factory=threading.Event)
    """To end now."""
    stop: threading.Event = field(default_factory=threading.Event)
    """To end after the step in progress, with its model."""
