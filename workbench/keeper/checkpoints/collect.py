"""Checkpoints between the pods and the run directory: brought back at the end of a run, sent to resume one.

Nothing here reads what is in them; which one is good enough is chosen in `rundir/checkpoints/choose.py`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workbench.base.errors import RunError, WorkbenchError
from workbench.keeper.launch.command import RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.rundir.checkpoints.choose import Checkpoint, number_in
from workbench.rundir.checkpoints.manifest import NAME, problem_of, read_manifest
from workbench.rundir.paths import PodRunPaths, RunPaths

__all__ = [
    "Parts",
    "Returned",
    "bring_checkpoints_back",
    "look",
    "send_checkpoint",
    "whole_steps",
]

logger = logging.getLogger(__name__)
_KEPT = 2
_SPARED = 256 << 20  # bytes left free on this machine's disk, for the logs and the result of the run
Parts = Mapping[int, Mapping[int, PurePosixPath]]  # folders on a pod by step and rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What came back from the pods."""

    steps: Sequence[int] = ()
    """The steps whose parts are here, the newest first."""
    notes: Sequence[str] = ()
    """What did not come back, and why."""


def bring_checkpoints_back(
    links: Sequence[AgentLink],
    places: Sequence[RankPlace],
    pods: Mapping[str, PodRunPaths],
    paths: RunPaths,
    most: int = _KEPT,
) -> Returned:
    """Bring the last checkpoints of a run back from its pods, those of which every part answers; each is checked."""
    held = look(links, pods)
    whole = whole_steps(held, {place.rank for place in places})[:most]
    with ThreadPoolExecutor(max_workers=max(1, len(links))) as pool:
        problems = {step: _fetch(pool, held, paths, step) for step in whole}
    here = _keep_the_last(paths)
    notes = [f"the checkpoint of step {step} did not come back: {said}" for step, said in problems.items() if said]
    silent = sorted(pods.keys() - {link.pod.name for link in held})
    if silent and (cut := [step for step in _steps_of(held) if step > max(here, default=0)]):
        notes.append(f"parts of the checkpoint of step {cut[0]} are on {', '.join(silent)}, out of reach")
    return Returned(steps=here, notes=notes)


def look(links: Sequence[AgentLink], pods: Mapping[str, PodRunPaths]) -> Mapping[AgentLink, Parts]:
    """Return the folders of parts on each pod that answers, by step and rank."""
    with ThreadPoolExecutor(max_workers=max(1, len(links))) as pool:
        looks = pool.map(lambda link: _parts_on(link, pods[link.pod.name]), links)
        return {link: parts for link, parts in zip(links, looks, strict=True) if parts is not None}


def whole_steps(held: Mapping[AgentLink, Parts], ranks: Collection[int]) -> list[int]:
    """Return the steps of which every rank's part is there, the newest first."""
    return [step for step in _steps_of(held) if set(ranks) <= _ranks_of(held, step)]


def send_checkpoint(link: AgentLink, chosen: Checkpoint, ranks: Collection[int], target: PurePosixPath) -> None:
    """Send the parts of the ranks of one pod into a folder on it; what lies on that pod is used where it is."""
    for rank in sorted(ranks & chosen.parts.keys()):
        part = chosen.parts[rank]
        if chosen.pods:
            if chosen.pods[rank] != link.pod.name:
                raise RunError(f"the checkpoint's part of rank {rank} lies on {chosen.pods[rank]}, not {link.pod.name}")
            link.run(["mkdir", "-p", "-m", "700", "--", str(target)])
            link.run(["ln", "-sfn", "--", str(part), str(target / f"rank-{rank}")])
            continue
        for path in sorted(part.iterdir()):
            link.put_file(path, str(target / f"rank-{rank}" / path.name))


def _parts_on(link: AgentLink, pod: PodRunPaths) -> Parts | None:
    """Return the folders of parts by step and rank; None for a pod that does not answer."""
    try:
        link.ensure()
        listed = link.run(["find", str(pod.root), "-mindepth", "4", "-maxdepth", "4", "-name", NAME, "-print0"])
    except WorkbenchError as error:
        logger.warning("%s", error)
        return None
    steps: dict[int, dict[int, PurePosixPath]] = {}
    for name in listed.split("\0"):
        folder = PurePosixPath(name).parent
        step, rank = number_in(folder.parent.name, "step"), number_in(folder.name, "rank")
        if step >= 0 and rank >= 0 and folder.parent.parent == pod.checkpoints:
            steps.setdefault(step, {})[rank] = folder
    return steps


def _steps_of(held: Mapping[AgentLink, Parts]) -> list[int]:
    return sorted({step for parts in held.values() for step in parts}, reverse=True)


def _ranks_of(held: Mapping[AgentLink, Parts], step: int) -> set[int]:
    return {rank for parts in held.values() for rank in parts.get(step, {})}


def _keep_the_last(paths: RunPaths) -> list[int]:
    """Remove all but the last checkpoints that are here, and give their steps, the newest first."""
    here = sorted((number_in(path.name, "step") for path in paths.checkpoints.glob("step-*")), reverse=True)
    for step in here[_KEPT:]:
        shutil.rmtree(paths.checkpoints / f"step-{step}", ignore_errors=True)
    return here[:_KEPT]


def _fetch(pool: ThreadPoolExecutor, held: Mapping[AgentLink, Parts], paths: RunPaths, step: int) -> str:
    """Bring one checkpoint back under another name, and give it its own when it is whole; else say what is wrong."""
    final = paths.checkpoints / f"step-{step}"
    if final.exists():
        return ""
    part = final.with_name(f".{final.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    wanted = [(link, rank, folder) for link, parts in held.items() for rank, folder in parts.get(step, {}).items()]

    def one(each: tuple[AgentLink, int, PurePosixPath]) -> str:
        link, rank, folder = each
        return _fetch_part(link, folder, part / link.pod.name / f"rank-{rank}")

    try:
        if problem := next(filter(None, list(pool.map(one, wanted))), ""):
            return problem
        part.rename(final)
    except (OSError, WorkbenchError) as error:
        return str(error)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ""


def _fetch_part(link: AgentLink, source: PurePosixPath, target: Path) -> str:
    link.get(str(source / NAME), target / NAME)
    files = read_manifest(target).get("files", {})
    needed, free = sum(entry["bytes"] for entry in files.values()), shutil.disk_usage(target).free
    if free < needed + _SPARED:
        return f"it takes {needed >> 20} MiB, and {free >> 20} MiB are free in {target.parent.parent.parent}"
    for name in files:
        link.get(str(source / name), target / name)
    return problem_of(target)
