"""Find the logs of a run's attempts. Every attempt has a folder of logs."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from workbench.base.files import records
from workbench.base.files.gate import open_within
from workbench.rundir.paths import RunPaths


def attempts_in(paths: RunPaths) -> list[int]:
    """Return the numbers of the attempts with a folder of logs, in order.

    Raise OSError for a folder of logs that cannot be read.
    """
    names = [folder.name for folder in records.folders_in(paths.logs, "attempt-*")]
    numbers = [name.removeprefix("attempt-") for name in names]
    return sorted(int(number) for number in numbers if number.isdecimal())


def last_logs(paths: RunPaths, stream: str) -> list[tuple[int, Path]]:
    """Return the logs of the last attempt, with the rank; [] for folders that cannot be read."""
    try:
        return list(rank_logs(paths, max(attempts_in(paths), default=0), stream))
    except OSError:
        return []


def open_log(log: Path) -> BufferedReader:
    """Open the log of a rank, following no link in the run directory. Raise OSError on failure."""
    return open_within(log, log.parents[2])


def rank_logs(paths: RunPaths, attempt: int, stream: str) -> Iterator[tuple[int, Path]]:
    """Yield the logs of an attempt, with the rank. `stream` is a pattern of names.

    Raise OSError for a folder that cannot be read.
    """
    folder = paths.rank_log(attempt, 0, stream).parent
    for log in records.files_in(folder, f"rank-*.{stream}.log"):
        name, _, _ = log.name.partition(".")
        rank = name.removeprefix("rank-")
        if rank.isdecimal():
            yield int(rank), log
