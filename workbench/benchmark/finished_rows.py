"""The finished rows of a benchmark on disk, and their validity by the note in `run.json`."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from workbench.base.files import read_json, write_json
from workbench.base.json_values import Json, as_float, as_int, as_objects, as_str, get_object
from workbench.base.package import file_digest, package_zip
from workbench.benchmark.read import row_of
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.jobs.job import Job
from workbench.rundir.catalog.find import find_runs

_KEPT = "benchmark.json"
# A larger file is known by its size and time, because reading would take seconds.
_WHOLE_BYTES = 64 << 20
_HOLDS = (Outcome.SUCCEEDED, Outcome.OUT_OF_MEMORY)


def code_of() -> str:
    """Return the fingerprint of the package as sent to the pods."""
    name, _ = package_zip()
    stem = name.removesuffix(".zip")
    return stem.removeprefix("workbench-")


def data_of(job: Job) -> str:
    """Return the fingerprint of a files of a job: data, model, DeepSpeed JSON, script folder."""
    digest = hashlib.sha256()
    for name, path in job.views.local_files():
        if path.is_file():
            line = f"{name}\0{_mark(path)}\n"
            digest.update(line.encode())
    return digest.hexdigest()[:16]


class FinishedRows:
    """The run directories below a folder, read when made; a missing folder is empty."""

    def __init__(self, folder: Path):
        infos: list[tuple[Path, Json]] = []
        for paths in find_runs(folder):
            infos.append((paths.root, read_json(paths.info)))
        # The newest run comes first.
        infos.sort(key=_submitted_s, reverse=True)
        self._by_place: dict[tuple[str, int], list[tuple[Path, Json]]] = defaultdict(list)
        for path, info in infos:
            note = get_object(info, "benchmark")
            if note:
                place = _place(note)
                self._by_place[place].append((path, note))

    def finished(self, note: Mapping[str, object]) -> BenchmarkRow | None:
        """Return the newest row of equal conditions that succeeded or ran out of memory."""
        for path in self._same(note):
            row = row_of(path)
            if row.outcome in _HOLDS:
                return replace(row, from_disk=True)
        return None

    def live(self, note: Mapping[str, object]) -> Path | None:
        """Return the directory of the same run if the run continues or waits for its cluster."""
        for path in self._same(note):
            row = row_of(path)
            if not row.outcome.is_terminal:
                return path
        return None

    def rows(self) -> Sequence[BenchmarkRow]:
        rows = []
        for runs in self._by_place.values():
            for path, _ in runs:
                rows.append(row_of(path))
        return rows

    def _same(self, note: Mapping[str, object]) -> list[Path]:
        wanted = get_object(note, "benchmark")
        runs = self._by_place.get(_place(wanted), [])
        return [path for path, its_note in runs if its_note == wanted]


def kept_rows(folder: Path) -> list[BenchmarkRow]:
    """Return all rows that the benchmarks of a folder have kept; none where there are none."""
    kept = read_json(folder / _KEPT)
    try:
        return [BenchmarkRow.read(row) for row in as_objects(kept.get("rows"))]
    except ValueError:
        return []


def keep_rows(folder: Path, rows: Sequence[BenchmarkRow]) -> None:
    """Replace the rows of equal key and repeat; other rows of the folder stay."""
    kept = {}
    for row in (*kept_rows(folder), *rows):
        kept[row.key, row.repeat] = row
    folder.mkdir(parents=True, exist_ok=True)
    forms = [row.to_dict() for row in kept.values()]
    write_json(folder / _KEPT, {"rows": forms})


def _submitted_s(found: tuple[Path, Json]) -> float:
    _, info = found
    return as_float(info.get("submitted_s")) or 0.0


def _place(note: Json) -> tuple[str, int]:
    """Return key and number of the repeat in a benchmark's note."""
    key = as_str(note.get("key"))
    repeat = as_int(note.get("repeat"))
    return key, repeat or 0


def _mark(path: Path) -> str:
    """Return the fingerprint of a file, or size and time of a large file."""
    stat = path.stat()
    if stat.st_size <= _WHOLE_BYTES:
        return file_digest(path)
    return f"{stat.st_size} {stat.st_mtime_ns}"
