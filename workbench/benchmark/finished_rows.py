"""Which rows of a benchmark are on disk already, and whether each still stands.

A row stands while what it came from is the same: its spec, this package's code, the files that the job names, and the
versions on the pods. All of that is kept in the note of its `run.json`; the run directories are the only store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.base.files import read_json
from workbench.base.package import file_digest, package_zip
from workbench.benchmark.read import row_of
from workbench.benchmark.row import Outcome, Row
from workbench.jobs.finetune import Job, Script
from workbench.rundir.make.script import script_files
from workbench.rundir.store import find_runs

__all__ = ["Found", "Standing", "code_of", "data_of", "note_of"]

_WHOLE_BYTES = 64 << 20  # a larger file is known by its size and time: it would take seconds to read
_STANDS = (Outcome.SUCCEEDED, Outcome.OUT_OF_MEMORY)


def code_of() -> str:
    """Return the fingerprint of this package, as it travels to the pods."""
    return package_zip()[0].removeprefix("workbench-").removesuffix(".zip")


def data_of(job: Job) -> str:
    """Return the fingerprint of the files that a job names: data, model, DeepSpeed JSON, or the script's folder."""
    digest = hashlib.sha256()
    for name, path in _files(job):
        digest.update(name.encode() + b"\0" + _mark(path).encode() + b"\n")
    return digest.hexdigest()[:16]


def note_of(key: str, repeat: int, *, code: str, data: str, versions: Mapping[str, str]) -> dict[str, object]:
    """Make the note that a benchmark leaves in the `run.json` of a row."""
    made = {"key": key, "repeat": repeat, "code": code, "data": data, "versions": dict(versions)}
    return {"benchmark": made}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A run directory of a benchmark's row."""

    path: Path
    """The run directory."""
    note: Mapping[str, object]
    """What the benchmark noted there."""
    submitted_s: float
    """When it was submitted, in seconds since 1970."""

    @property
    def place(self) -> tuple[str, int]:
        """Key and repeat."""
        repeat = self.note.get("repeat")
        return str(self.note.get("key", "")), repeat if isinstance(repeat, int) else 0


class Standing:
    """The rows below one folder, as they were when it was made."""

    def __init__(self, folder: Path):
        """Look; a folder that is not there holds nothing."""
        found: dict[tuple[str, int], list[Found]] = {}
        for each in _look(folder):
            found.setdefault(each.place, []).append(each)
        self._found = {place: sorted(them, key=lambda f: -f.submitted_s) for place, them in found.items()}

    def finished(self, note: Mapping[str, object]) -> Row | None:
        """Return the newest finished row that stands: it succeeded or ran out of memory, all else being equal."""
        for found in self._same(note):
            row = row_of(found.path)
            if row.outcome in _STANDS:
                return replace(row, from_disk=True)
        return None

    def live(self, note: Mapping[str, object]) -> Path | None:
        """Return the directory of a run that stands and goes on, or waits for its cluster."""
        for found in self._same(note):
            if not row_of(found.path).outcome.is_terminal:
                return found.path
        return None

    def rows(self) -> Sequence[Row]:
        """Return all rows, of any version."""
        return [row_of(found.path) for them in self._found.values() for found in them]

    def _same(self, note: Mapping[str, object]) -> list[Found]:
        wanted = note["benchmark"]
        assert isinstance(wanted, Mapping)
        return [f for f in self._found.get((str(wanted["key"]), int(wanted["repeat"])), []) if f.note == wanted]


def _look(folder: Path) -> Iterator[Found]:
    for paths in find_runs(folder):
        info = read_json(paths.info)
        note, submitted = info.get("benchmark"), info.get("submitted_s")
        if isinstance(note, dict):
            yield Found(
                path=paths.root, note=note, submitted_s=float(submitted) if isinstance(submitted, int | float) else 0.0
            )


def _files(job: Job) -> Iterator[tuple[str, Path]]:
    if isinstance(job, Script):
        folder = Path(job.path).expanduser().parent
        for path in script_files(folder):
            yield path.relative_to(folder).as_posix(), path
        return
    dataset = job.dataset.values() if isinstance(job.dataset, Mapping) else [job.dataset]
    named = [part for value in dataset for part in (value if isinstance(value, list | tuple) else [value])]
    for value in [*named, job.model, job.deepspeed]:
        place = Path(value).expanduser() if isinstance(value, str) and value else None
        if place is None or not place.exists():
            continue
        inside = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
        for path in inside:
            yield path.relative_to(place.parent).as_posix(), path


def _mark(path: Path) -> str:
    known = path.stat()
    return file_digest(path) if known.st_size <= _WHOLE_BYTES else f"{known.st_size} {known.st_mtime_ns}"
