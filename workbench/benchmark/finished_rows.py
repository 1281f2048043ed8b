"""The finished rows of a benchmark on disk, and their validity by the note in `run.json`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.base.files import read_json, write_json
from workbench.base.json_values import Json, number, part, parts, text, whole
from workbench.base.package import file_digest, package_zip
from workbench.benchmark.read import row_of
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.jobs.job import Job
from workbench.rundir.catalog.store import find_runs

_KEPT = "benchmark.json"
_WHOLE_BYTES = (
    64 << 20
)  # a larger file is known by its size and time: it would take seconds to read
_HOLDS = (Outcome.SUCCEEDED, Outcome.OUT_OF_MEMORY)


def code_of() -> str:
    """Return the fingerprint of the package as sent to the pods."""
    return package_zip()[0].removeprefix("workbench-").removesuffix(".zip")


def data_of(job: Job) -> str:
    """Return the fingerprint of a job's files: data, model, DeepSpeed JSON, or the script's folder."""
    digest = hashlib.sha256()
    for name, path in job.local_files():
        if path.is_file():
            digest.update(name.encode() + b"\0" + _mark(path).encode() + b"\n")
    return digest.hexdigest()[:16]


class FinishedRows:
    """The run directories below a folder, read when made; a missing folder is empty."""

    def __init__(self, folder: Path):
        infos = [(paths.root, read_json(paths.info)) for paths in find_runs(folder)]
        infos.sort(key=lambda info: -(number(info[1].get("submitted_s")) or 0.0))
        self._by_place: dict[tuple[str, int], list[tuple[Path, Json]]] = defaultdict(list)
        for path, info in infos:
            if note := part(info, "benchmark"):
                self._by_place[_place(note)].append((path, note))

    def finished(self, note: Mapping[str, object]) -> BenchmarkRow | None:
        """Return the newest valid row that succeeded or ran out of memory, with equal conditions."""
        rows = (row_of(path) for path in self._same(note))
        return next((replace(row, from_disk=True) for row in rows if row.outcome in _HOLDS), None)

    def live(self, note: Mapping[str, object]) -> Path | None:
        """Return the directory of the same run if it goes on, or waits for its cluster."""
        return next(
            (path for path in self._same(note) if not row_of(path).outcome.is_terminal), None
        )

    def rows(self) -> Sequence[BenchmarkRow]:
        return [row_of(path) for runs in self._by_place.values() for path, _ in runs]

    def _same(self, note: Mapping[str, object]) -> list[Path]:
        wanted = part(note, "benchmark")
        return [path for path, its in self._by_place.get(_place(wanted), []) if its == wanted]


def kept_rows(folder: Path) -> list[BenchmarkRow]:
    """Return all rows that the benchmarks of a folder have kept; none where there are none."""
    try:
        return [BenchmarkRow.read(row) for row in parts(read_json(folder / _KEPT).get("rows"))]
    except ValueError:
        return []


def keep_rows(folder: Path, rows: Sequence[BenchmarkRow]) -> None:
    """Replace the rows of equal key and repeat; other rows of the folder stay."""
    kept = {(row.key, row.repeat): row for row in (*kept_rows(folder), *rows)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _KEPT, {"rows": [row.to_dict() for row in kept.values()]})


def _place(note: Json) -> tuple[str, int]:
    return text(note.get("key")), whole(note.get("repeat")) or 0


def _mark(path: Path) -> str:
    stat = path.stat()
    return (
        file_digest(path) if stat.st_size <= _WHOLE_BYTES else f"{stat.st_size} {stat.st_mtime_ns}"
    )
