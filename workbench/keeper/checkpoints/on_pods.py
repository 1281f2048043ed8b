"""Checkpoints on the pods that wrote them: where they lie, and whether they are good."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.base import entries
from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import read_json
from workbench.base.json_values import part
from workbench.base.wire import ask
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.context import RunContext
from workbench.rundir.checkpoints import CHECKPOINT, NAME, Checkpoint, ReadPart, number_in
from workbench.rundir.paths import ClusterPaths, RunPaths

logger = logging.getLogger(__name__)
_PING_S = 2.0
_READ_S = 3600.0  # the parts of a large model are read whole, on their pods
# Runs on a pod, with this package on its path: says what is wrong with each part, and what its manifest says it is.
_JUDGE = (
    f"import json, sys; from pathlib import Path; from {entries.MANIFEST} import problem_of, read_manifest\n"
    "print(json.dumps([[problem_of(Path(p)), dict(read_manifest(Path(p)))] for p in sys.argv[1:]]))"
)


PodPart = tuple[AgentLink, int, PurePosixPath]
"""A pod, a rank, and the folder of the rank's part there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodCheckpoints:
    steps: Mapping[int, Sequence[PodPart]]
    """By step, all parts that were seen."""
    world_size: int
    silent: Sequence[str]
    """Names of the pods that did not answer."""

    @property
    def whole(self) -> list[int]:
        """The steps of which every rank's part is there, the newest first."""
        whole = [step for step, parts in self.steps.items() if len({rank for _, rank, _ in parts}) == self.world_size]
        return sorted(whole, reverse=True)


def look(context: RunContext, lost: Collection[str] = ()) -> PodCheckpoints:
    """Ask the pods of a run which parts of checkpoints they have; of lost ones, those that have but another agent."""

    def one(link: AgentLink) -> list[tuple[int, int, PurePosixPath]] | None:
        asked = link.pod.name not in lost or _answers(link)
        return _parts_on(link, context.on_pod(link).checkpoints) if asked else None

    answers = context.everywhere(one)
    steps: dict[int, list[PodPart]] = {}
    for link, parts in zip(context.links, answers, strict=True):
        for step, rank, folder in parts or ():
            steps.setdefault(step, []).append((link, rank, folder))
    silent = sorted(link.pod.name for link, parts in zip(context.links, answers, strict=True) if parts is None)
    return PodCheckpoints(steps=steps, world_size=len(context.places), silent=silent)


def part_reader(links: Sequence[AgentLink]) -> ReadPart:
    """Return what reads a part as its own pod sees it: what is wrong with it, and its manifest."""
    by_name = {link.pod.name: link for link in links}

    def read(pod: str, folder: Path) -> tuple[str, Mapping[str, object]]:
        link = by_name.get(pod)
        if link is None:
            return "there is no such pod any more", {}
        argv = ["env", f"PYTHONPATH={link.package}", link.pod.python, "-P", "-c", _JUDGE, str(folder)]
        try:
            ((problem, manifest),) = json.loads(link.run(argv, _READ_S, again=True))
        except (WorkbenchError, ValueError) as error:
            return f"{folder.name} cannot be read: {error}", {}
        return problem, manifest

    return read


def held_checkpoint(cluster: Path, paths: RunPaths, last_step: int | None, ranks: int) -> Checkpoint | None:
    """Ask a cluster's keeper for the checkpoint on a run's pods; what other ranks cannot use there is brought back."""
    if not paths.held.exists():
        return None
    info = read_json(paths.info)
    home = Path(str(info.get("cluster")))
    parts = part(read_json(paths.held), "parts")
    if home != cluster or any(len(part(parts, step)) != ranks for step in parts):
        try:
            ask(ClusterPaths(home).socket, {"op": "bring", "run": str(info.get("id"))}, timeout_s=_READ_S)
            return None
        except RunError as error:
            logger.info("the checkpoints of %s do not come back: %s", paths.root, error)
    try:
        request = {"op": "held", "path": str(paths.root), "last_step": last_step}
        checkpoint: Any = ask(ClusterPaths(cluster).socket, request, timeout_s=_READ_S)["checkpoint"]
    except RunError as error:
        raise ConfigError(
            f"{error}; they were left on the pods of {home}: with checkpoints='bring' they would be here"
        ) from error
    return CHECKPOINT.validate_python(checkpoint)


def _answers(link: AgentLink) -> bool:
    try:
        link.call("ping", timeout_s=_PING_S)
    except WorkbenchError:
        return False
    return True


def _parts_on(link: AgentLink, checkpoints: PurePosixPath) -> list[tuple[int, int, PurePosixPath]] | None:
    find = ["find", str(checkpoints.parent), "-mindepth", "4", "-maxdepth", "4", "-name", NAME, "-print0"]
    try:
        link.ensure()
        folders = [PurePosixPath(name).parent for name in link.run(find).split("\0")]
    except WorkbenchError as error:
        logger.warning("%s", error)
        return None
    parts = [(number_in(f.parent.name, "step"), number_in(f.name, "rank"), f) for f in folders]
    return [(s, r, f) for s, r, f in parts if s >= 0 and r >= 0 and f.parent.parent == checkpoints]
