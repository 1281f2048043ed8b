"""Read and check the checkpoints of a run, and choose the newest valid checkpoint to continue from.

A part's manifest is written last and has checksums, because torch and safetensors load flipped bits
without an error.
"""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.errors import ConfigError
from workbench.base.files import not_ours, read_json, records, write_json
from workbench.base.files.folders import remove_folder
from workbench.base.json_values import Json, as_int, as_list, as_str, get_object
from workbench.base.record.tolerant import Whole
from workbench.rundir.paths import RunPaths

logger = logging.getLogger(__name__)
NAME = "manifest.json"
"""Name of the manifest file in a rank's part of a checkpoint."""
INPUTS = "inputs.json"
"""Name of the file with the SHA-256 of a run's inputs, in a run's folder of a store or of pods."""
_NUMBER = re.compile(r"[0-9]{1,18}")
Places = Mapping[int, tuple[str, Path]]
"""Pod and folder of every rank's part."""
ReadPart = Callable[[str, Path], tuple[str, Mapping[str, Any]]]
"""Function from a pod's name and a part's folder to the part's problem and manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    step: int
    """Number of optimizer steps before the checkpoint."""
    parts: Mapping[int, Path]
    """Folders of the parts, by rank."""
    pods: Mapping[int, str] = field(default_factory=dict)
    """Names of the pods with the parts, by rank. Empty: the parts are in the run directory."""
    notes: Sequence[str] = ()
    """Reasons why newer checkpoints were left out, a line per checkpoint."""
    shared: bool = False
    """Whether all pods read the parts where they are, in a shared folder."""

    @property
    def world_size(self) -> int:
        return len(self.parts)


CHECKPOINT = TypeAdapter(Checkpoint)
"""Converter from and to the JSON form."""


def newest_good(
    root: Path, *, last_step: int | None = None, on_pods: ReadPart | None = None
) -> Checkpoint:
    """Return the newest valid checkpoint before `last_step` in a run directory or on its pods.

    Every byte is read. Raise ConfigError if no checkpoint is valid.
    """
    paths = RunPaths(root)
    if on_pods:
        found, notes = choose_newest(_on_pods(paths), on_pods, last_step)
        if found is not None:
            return found
        raise ConfigError(
            f"there is no checkpoint to resume from on the pods of {root}: {'; '.join(notes)}"
        )
    shared = shared_run(paths)
    folder = (shared or paths).checkpoints
    found, notes = choose_newest(steps_in(folder), read_own, last_step)
    if found is not None:
        return replace(found, pods={}, shared=shared is not None)
    why = "; ".join(notes)
    if not notes:
        why = f"{folder} is empty: the run saved no checkpoint (save_steps), or has not ended"
    raise ConfigError(f"there is no checkpoint to resume from in {root}: {why}")


def shared_run(paths: RunPaths) -> RunPaths | None:
    """Return a run's folder in the shared folder of its checkpoints. None: the run has no such.

    The folder has the files of a run directory that another run needs to resume.
    """
    folder = as_str(read_json(paths.job).get("shared"))
    return RunPaths(Path(folder)) if folder else None


def model_folder(paths: RunPaths) -> Path:
    """Return the folder of a run's trained model: in the shared folder, or in the run directory."""
    return (shared_run(paths) or paths).model


def digests_below(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by the name within. Missing: no files."""
    files = records.files_below(folder)
    return {path.relative_to(folder).as_posix(): records.sha256_of(path) for path in files}


def choose_newest(
    steps: Mapping[int, Places], read: ReadPart, last_step: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint before `last_step`, and a note for each newer one."""
    notes: list[str] = []
    # The newest checkpoint with all parts whole wins; every newer one is named with its fault.
    for step, places in sorted(steps.items(), reverse=True):
        if last_step is not None and step >= last_step:
            problem = f"max_steps is {last_step}, no step is left after the checkpoint"
        else:
            looked_at = {}
            for rank, (pod, place) in places.items():
                part_problem, manifest = read(pod, place)
                looked_at[rank] = (pod, part_problem, manifest)
            problem = _problem(step, looked_at)
        if not problem:
            parts = {rank: part for rank, (_, part) in places.items()}
            pods = {rank: pod for rank, (pod, _) in places.items()}
            return Checkpoint(step=step, parts=parts, pods=pods, notes=notes), notes
        notes.append(f"the checkpoint of step {step} was left out: {problem}")
    return None, notes


def keep_newest(folder: Path, most: int = 2, busy: Collection[int] = ()) -> list[int]:
    """Remove all but the `most` newest checkpoints of a folder, and the steps in `busy`.

    Return the `most` newest steps, newest first.
    """
    steps = [number_in(path.name, "step") for path in records.folders_in(folder, "step-*")]
    steps.sort(reverse=True)
    kept = steps[:most]
    old = [step for step in steps[most:] if step not in busy]
    if not old:
        return kept
    try:
        # After a power cut, the disk has the old checkpoints or the new ones.
        for step in kept:
            records.sync_below(folder / f"step-{step}")
    except OSError as error:
        logger.warning(
            "older checkpoints in %s stay: the newer cannot be synced: %s", folder, error
        )
        return kept
    for step in old:
        remove_folder(folder / f"step-{step}")
    return kept


def remove_after(folder: Path, step: int) -> None:
    """Remove the damaged checkpoints after a step; the run repeats the later steps."""
    for path in records.folders_in(folder, "step-*"):
        if number_in(path.name, "step") > step:
            remove_folder(path)


def number_in(name: str, what: str) -> int:
    """Return the number in the name of a step's or a rank's folder; -1 for any other name.

    Example:
        >>> number_in("step-12", "step"), number_in("rank-0.part", "rank")
        (12, -1)
    """
    word, _, number = name.partition("-")
    if word != what or not _NUMBER.fullmatch(number):
        return -1
    return int(number)


def steps_in(folder: Path) -> dict[int, Places]:
    """Return the pods and folders of the parts of all ranks, by step."""
    steps: dict[int, Places] = {}
    for path in records.folders_in(folder, "step-*"):
        step = number_in(path.name, "step")
        if step < 0:
            continue
        places: dict[int, tuple[str, Path]] = {}
        for pod in records.folders_in(path):
            for place in records.folders_in(pod, "rank-*"):
                rank = number_in(place.name, "rank")
                places[rank] = (pod.name, place)
        steps[step] = places
    return steps


def _on_pods(paths: RunPaths) -> dict[int, Places]:
    steps = get_object(read_json(paths.held), "parts")
    try:
        return {int(step): _places(get_object(steps, step)) for step in steps}
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{paths.held} does not name the places of the checkpoints ({error}); "
            "resume needs the places"
        ) from error


def _places(parts: Json) -> Places:
    places = {}
    for rank, place in parts.items():
        pod, folder = as_list(place)
        places[int(rank)] = (str(pod), Path(str(folder)))
    return places


def _problem(step: int, parts: Mapping[int, tuple[str, str, Mapping[str, Any]]]) -> str:
    # The first part says how many ranks wrote the checkpoint.
    manifests = [manifest for _, _, manifest in parts.values()]
    size = 0
    if manifests:
        size = as_int(manifests[0].get("world_size")) or 0
    for rank in range(size):
        if rank not in parts:
            return f"the part of rank {rank} of {size} is missing"
    for rank, (pod, problem, manifest) in parts.items():
        if problem:
            return f"{problem} ({pod})"
        written = [manifest.get(name) for name in ("rank", "step", "world_size")]
        if written != [rank, step, size]:
            return f"rank-{rank} is the part of another checkpoint ({pod})"
    if not size or len(parts) != size:
        return "no part has a readable manifest"
    return ""


def read_own(_pod: str, part: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the problem and the manifest of a part here. A part of another user has a problem."""
    # Another user may have changed files with foreign ownership or write access.
    for path in (part, *records.files_in(part)):
        foreign = not_ours(path)
        if foreign:
            return f"{foreign}; only checkpoints of your own are used", read_manifest(part)
    return problem_of(part), read_manifest(part)


def write_manifest(folder: Path, **facts: object) -> int:
    """Write the manifest of a part, and return the bytes of the files."""
    listed = {}
    total = 0
    for path in records.files_in(folder):
        if path.name == NAME:
            continue
        size = path.stat().st_size
        total += size
        listed[path.name] = {"bytes": size, "sha256": records.sha256_of(path)}
    write_json(folder / NAME, {**facts, "files": listed})
    return total


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """Read the manifest of a part. Return an empty mapping if the manifest cannot be read."""
    manifest = read_json(folder / NAME)
    try:
        _FILES.validate_python(manifest.get("files"))
    except ValidationError:
        return {}
    return manifest


def problem_of(folder: Path) -> str:
    """Compare every byte of a part with the manifest; return the problem, or an empty text."""
    manifest = read_manifest(folder)
    if not manifest:
        return f"{folder.name} has no manifest that can be read"
    for name, entry in manifest["files"].items():
        path = folder / name
        facts = records.facts_of(path)
        if facts is None or not stat.S_ISREG(facts.st_mode):  # the name may be too long
            return f"{folder.name}/{name[:200]} is missing"
        size = facts.st_size
        if size != entry["bytes"]:
            return f"{folder.name}/{name} has {size} bytes and was written with {entry['bytes']}"
        if records.sha256_of(path) != entry["sha256"]:
            return f"the checksum of {folder.name}/{name} is wrong"
    return ""


@dataclass
class _FileEntry:
    bytes: Whole
    sha256: str


def _plain(name: str) -> str:
    if name in ("", ".", "..", NAME) or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the plain name of a file")
    return name


_FILES = TypeAdapter(dict[Annotated[str, AfterValidator(_plain)], _FileEntry])
