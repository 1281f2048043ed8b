"""Checkpoints between the pods and the run directory: brought back at the end of a run, chosen to resume one.

A checkpoint is one folder `step-N`, with the part of every rank below the name of its pod. It is used only when all
parts are there, match their manifests byte by byte, and belong to this user. Nothing here reads what is in them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.keeper.launch.command import RankPlace
from workbench.keeper.link.agent import AgentLink
from workbench.rundir.checkpoints.manifest import NAME, problem_of, read_manifest
from workbench.rundir.paths import PodRunPaths, RunPaths

__all__ = [
    "Checkpoint",
    "Parts",
    "Returned",
    "bring_checkpoints_back",
    "look",
    "newest_good",
    "send_checkpoint",
    "step_problem",
    "whole_steps",
]

logger = logging.getLogger(__name__)
_STEP, _RANK = re.compile(r"step-(\d+)"), re.compile(r"rank-(\d+)")
_KEPT = 2
_SPARED = 256 << 20  # bytes left free on this machine's disk, for the logs and the result of the run
Parts = Mapping[int, Mapping[int, PurePosixPath]]  # folders on a pod by step and rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that was looked at and found good."""

    step: int
    """The optimizer step after which it was made."""
    parts: Mapping[int, Path]
    """The folder of each rank's part."""
    pods: Mapping[int, str] = field(default_factory=dict)
    """The pods that the parts lie on, by rank; empty where they are in the run directory."""
    notes: Sequence[str] = ()
    """Why newer ones were left out, one line each."""

    @property
    def world_size(self) -> int:
        """The number of ranks that made it."""
        return len(self.parts)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; `from_dict` reads it back."""
        parts, pods = ({str(r): str(x) for r, x in each.items()} for each in (self.parts, self.pods))
        return {"step": self.step, "parts": parts, "pods": pods, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Read the JSON form."""
        parts = {int(rank): Path(part) for rank, part in data["parts"].items()}
        pods = {int(rank): pod for rank, pod in data.get("pods", {}).items()}
        return cls(step=data["step"], parts=parts, pods=pods, notes=data["notes"])


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


def newest_good(root: Path, *, last_step: int | None = None) -> Checkpoint:
    """Find the newest checkpoint of a run directory that is whole and undamaged; every byte of it is read."""
    folder = RunPaths(root).checkpoints
    steps = sorted((_number(_STEP, path.name), path) for path in folder.glob("step-*") if _STEP.fullmatch(path.name))
    notes: list[str] = []
    for step, path in reversed(steps):
        parts = {_number(_RANK, part.name): part for part in sorted(path.glob("*/rank-*")) if part.is_dir()}
        done = last_step is not None and step >= last_step
        problem = (
            f"max_steps is {last_step}, nothing is left to do after it"
            if done
            else step_problem(step, {rank: _judge(part) for rank, part in parts.items()})
        )
        if not problem:
            return Checkpoint(step=step, parts=parts, notes=notes)
        notes.append(f"the checkpoint of step {step} was left out: {problem}")
    why = "; ".join(notes) or f"{folder} is empty: its run saved none (save_steps), or has not ended"
    raise ConfigError(f"there is no checkpoint to resume from in {root}: {why}")


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
        step, rank = _STEP.fullmatch(folder.parent.name), _RANK.fullmatch(folder.name)
        if step and rank and folder.parent.parent == pod.checkpoints:
            steps.setdefault(int(step[1]), {})[int(rank[1])] = folder
    return steps


def _steps_of(held: Mapping[AgentLink, Parts]) -> list[int]:
    return sorted({step for parts in held.values() for step in parts}, reverse=True)


def _ranks_of(held: Mapping[AgentLink, Parts], step: int) -> set[int]:
    return {rank for parts in held.values() for rank in parts.get(step, {})}


def _keep_the_last(paths: RunPaths) -> list[int]:
    """Remove all but the last checkpoints that are here, and give their steps, the newest first."""
    here = sorted((_number(_STEP, path.name) for path in paths.checkpoints.glob("step-*")), reverse=True)
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


def step_problem(step: int, parts: Mapping[int, tuple[str, Mapping[str, Any], str]]) -> str:
    """Return what is wrong with a checkpoint; empty where nothing is."""
    told = [facts.get("world_size") for _, facts, _ in parts.values()]
    size = told[0] if told and isinstance(told[0], int) else 0
    if missing := [rank for rank in range(size) if rank not in parts]:
        return f"the part of rank {missing[0]} of {size} is missing"
    for rank, (problem, facts, pod) in parts.items():
        if problem:
            return f"{problem} ({pod})"
        if (facts.get("rank"), facts.get("step"), facts.get("world_size")) != (rank, step, size):
            return f"rank-{rank} is the part of another checkpoint ({pod})"
    return "" if size and len(parts) == size else "it has no parts with a manifest that can be read"


def _judge(part: Path) -> tuple[str, Mapping[str, Any], str]:
    return _not_ours(part) or problem_of(part), read_manifest(part), part.parent.name


def _not_ours(part: Path) -> str:
    """Return what is not this user's own: what others could write is not what a run of ours left."""
    for path in (part, *part.iterdir()):
        facts = path.lstat()
        if facts.st_uid != os.getuid() or facts.st_mode & stat.S_IWOTH:
            return f"{path} belongs to another user, or others may write to it; only checkpoints of your own are used"
    return ""


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else -1
