"""Checkpoints of a run in an object store, with the files that another machine needs to resume.

Below `PREFIX/RUN_ID/` are `run.json`, `job.json` and a folder `step-N/` for every checkpoint. The
manifest `step-N/checkpoint.json` is written last: a folder without a manifest is no checkpoint.
Everything read here is foreign: anyone with the right to write there may have changed the objects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.errors import ConfigError, RunError
from workbench.base.files import records, write_json, write_text
from workbench.base.files.disk import check_room
from workbench.base.files.folders import remove_folder
from workbench.base.json_values import parse_json
from workbench.base.words import short_list
from workbench.rundir.checkpoints import INPUTS, number_in, problem_of
from workbench.rundir.format import FORMAT, check_format
from workbench.rundir.paths import RunPaths
from workbench.rundir.stores.address import is_safe_name
from workbench.rundir.stores.store import Copy, Store

MANIFEST = "checkpoint.json"
"""Name of the object that makes a folder of objects a checkpoint."""
RUN = "run.json"
"""Name of the record of a run: written after `job.json`."""
JOB = "job.json"
_T = TypeVar("_T")
_MOST_BYTES = 16 << 20  # of a record
_MOST_FILES = 20_000
_DEPTH = 3  # a file's name: pod, rank, name of the file


def _file_of_part(name: str) -> str:
    _, _, rank = name.rpartition("/")[0].rpartition("/")
    if not is_safe_name(name, _DEPTH) or number_in(rank, "rank") < 0:
        raise ValueError(f"{name[:200]!r} is not the file of a rank's part")
    return name


def _plain(name: str) -> str:
    if not is_safe_name(name, 1):
        raise ValueError(f"{name[:200]!r} is not the plain name of a file")
    return name


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """Manifest of a checkpoint."""

    step: Annotated[int, Field(ge=1, strict=True)]
    files: Annotated[
        Mapping[Annotated[str, AfterValidator(_file_of_part)], StoredFile],
        Field(min_length=1, max_length=_MOST_FILES),
    ]
    """Files by name: `POD/rank-R/NAME`."""

    @property
    def size(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """Record of a run."""

    run: str
    job: StoredFile
    """Content of `job.json`."""
    inputs: Mapping[Annotated[str, AfterValidator(_plain)], StoredFile]
    """Files that the run sent to its pods, by name. The files themselves are not stored."""
    format: int = FORMAT


_CHECKPOINT = TypeAdapter(StoredCheckpoint)
_RUN = TypeAdapter(StoredRun)


def put_run(store: Store, paths: RunPaths, run_id: str) -> None:
    """Write a run's record and its job, which a restart may have changed."""
    inputs = {}
    for path in records.files_in(paths.inputs):
        inputs[path.name] = _stored(path)
    job = inputs.pop(paths.job.name)
    record = StoredRun(run=run_id, job=job, inputs=inputs)
    store.put([_copy(store, paths.job, paths.root, JOB, job)])
    store.write(RUN, _RUN.dump_json(record).decode())


def checkpoint_of(paths: RunPaths, step: int) -> StoredCheckpoint:
    """Return the manifest of a checkpoint in a run directory. Every byte is read."""
    folder = paths.checkpoints / f"step-{step}"
    files = {}
    for path in records.files_below(folder):
        files[path.relative_to(folder).as_posix()] = _stored(path)
    return StoredCheckpoint(step=step, files=files)


def is_stored(store: Store, checkpoint: StoredCheckpoint) -> bool:
    """Whether the store has all of a checkpoint."""
    return store.read(_manifest_of(checkpoint), _MOST_BYTES) == _content(checkpoint)


def put_checkpoint(
    store: Store, paths: RunPaths, checkpoint: StoredCheckpoint, there: Collection[str] = ()
) -> None:
    """Write a checkpoint of a run directory, the manifest last.

    Files in `there` are in the store already.
    """
    folder = paths.checkpoints / f"step-{checkpoint.step}"
    copies = []
    for each, facts in checkpoint.files.items():
        if each not in there:
            name = f"{folder.name}/{each}"
            copies.append(_copy(store, folder / each, paths.root, name, facts))
    store.put(copies)
    store.write(_manifest_of(checkpoint), _content(checkpoint))


def _manifest_of(checkpoint: StoredCheckpoint) -> str:
    return f"step-{checkpoint.step}/{MANIFEST}"


def _content(checkpoint: StoredCheckpoint) -> str:
    return _CHECKPOINT.dump_json(checkpoint).decode()


def trim(store: Store, most: int) -> None:
    """Remove all but the newest `most` checkpoints, and every older incomplete checkpoint."""
    below = _objects(store)
    complete = sorted(_complete(below), reverse=True)
    oldest_kept = complete[:most][-1] if complete else 0
    gone: list[str] = []
    for step, names in sorted(_steps(below).items()):
        if step < oldest_kept:
            # First the manifest: a rest of a checkpoint must not look like a checkpoint.
            names.sort(key=lambda name: not name.endswith(f"/{MANIFEST}"))
            gone += [store.at(name) for name in names]
    store.remove(gone)


def fetch_run(store: Store, target: Path) -> None:
    """Fetch a run's job and the digests of its inputs into the run directory `target`.

    Raises:
        ConfigError: The address has no run.
        RunError: The store refuses, or an object is damaged.
    """
    text = store.read(RUN, _MOST_BYTES)
    if text is None:
        raise ConfigError(f"{store.address} is not the address of a run{_runs_below(store)}")
    record = _parsed(_RUN, text, store.at(RUN))
    job = store.read(JOB, _MOST_BYTES)
    if job is None:
        raise RunError(f"{store.at(JOB)} is missing; resume from another run")
    paths = RunPaths(target)
    paths.inputs.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(paths.job, job)
    if _stored(paths.job) != record.job:
        raise RunError(f"the checksum of {store.at(JOB)} is wrong; resume from another run")
    inputs = {name: {"sha256": file.sha256} for name, file in record.inputs.items()}
    write_json(target / INPUTS, inputs)


def fetch_newest(store: Store, target: Path, *, last_step: int | None = None) -> list[str]:
    """Fetch the newest complete checkpoint before `last_step` into the run directory `target`.

    Return why newer checkpoints were left out, a line per checkpoint.

    Raises:
        ConfigError: No checkpoint is complete and undamaged.
        DiskFull: The disk has no room for the checkpoint.
        RunError: The store refuses.
    """
    below = _objects(store)
    notes: list[str] = []
    for step in sorted(_steps(below), reverse=True):
        if step not in _complete(below):
            problem = "its upload did not end"
        elif last_step is not None and step >= last_step:
            problem = f"max_steps is {last_step}, no step is left after the checkpoint"
        else:
            problem = _fetch(store, below, step, target)
        if not problem:
            return notes
        notes.append(f"the checkpoint of step {step} was left out: {problem}")
    why = "; ".join(notes) or "no checkpoint was uploaded"
    raise ConfigError(f"there is no checkpoint to resume from in {store.address}: {why}")


def _fetch(store: Store, below: Mapping[str, int], step: int, target: Path) -> str:
    """Fetch a checkpoint. Return the problem, or an empty text."""
    name = f"step-{step}"
    text = store.read(f"{name}/{MANIFEST}", _MOST_BYTES)
    if text is None:
        return "its manifest cannot be read"
    try:
        manifest = _parsed(_CHECKPOINT, text, store.at(f"{name}/{MANIFEST}"))
    except RunError as error:
        return str(error)
    if manifest.step != step:
        return f"its manifest is of step {manifest.step}"
    for file, facts in manifest.files.items():
        there = below.get(f"{name}/{file}")
        if there != facts.bytes:
            return f"{file} has {there} bytes and was written with {facts.bytes}"
    check_room(target, manifest.size)
    folder = RunPaths(target).checkpoints / name
    problem = "the download did not end"
    try:
        problem = _fetched(store, manifest, folder)
    finally:
        if problem:
            remove_folder(folder)
    return problem


def _fetched(store: Store, manifest: StoredCheckpoint, folder: Path) -> str:
    """Fetch the files of a checkpoint and compare every byte with both manifests."""
    copies = []
    for file, facts in manifest.files.items():
        path = folder / file
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copies.append(_copy(store, path, folder, f"{folder.name}/{file}", facts))
    for copy, digest in zip(copies, store.get(copies), strict=True):
        if digest != copy.sha256:
            return f"the checksum of {copy.path.relative_to(folder)} is wrong"
    for pod in records.folders_in(folder):
        for rank in records.folders_in(pod):
            problem = problem_of(rank)
            if problem:
                return problem
    return ""


def _objects(store: Store) -> dict[str, int]:
    """Return the bytes of every object of a run, by name below the address."""
    start = f"{store.address}/"
    objects = {}
    for address, size in store.list("deep").objects.items():
        objects[address.removeprefix(start)] = size
    return objects


def _steps(below: Mapping[str, int]) -> dict[int, list[str]]:
    steps: dict[int, list[str]] = {}
    for name in below:
        step = number_in(name.partition("/")[0], "step")
        if step > 0:
            steps.setdefault(step, []).append(name)
    return steps


def _complete(below: Mapping[str, int]) -> set[int]:
    return {step for step in _steps(below) if f"step-{step}/{MANIFEST}" in below}


def _runs_below(store: Store) -> str:
    """Return the addresses of the runs below a prefix, for a message."""
    end = f"/{RUN}"
    runs = []
    for address in store.list("deep").objects:
        if address.endswith(end):
            runs.append(address.removesuffix(end))
    if not runs:
        return ": there is no run.json"
    return f"; name one of its runs: {short_list(sorted(runs, reverse=True))}"


def _parsed(adapter: TypeAdapter[_T], text: str, where: str) -> _T:
    try:
        raw = parse_json(text)
        if isinstance(raw, dict):
            check_format(raw, where)
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise RunError(f"{where} is no manifest: {place}: {first['msg'][:300]}") from error
    except ValueError as error:
        raise RunError(f"{where} is not JSON: {error}") from error


def _stored(path: Path) -> StoredFile:
    return StoredFile(bytes=path.lstat().st_size, sha256=records.sha256_of(path))


def _copy(store: Store, path: Path, within: Path, name: str, facts: StoredFile) -> Copy:
    return Copy(
        path=path,
        within=within,
        address=store.at(name),
        bytes=facts.bytes,
        sha256=facts.sha256,
    )
