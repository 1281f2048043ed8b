"""Find the runs and clusters below a folder."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from workbench.rundir.paths import ClusterPaths, RunPaths

_DEEPEST = 7  # levels of folders below the first folder
_RUN_FILE = RunPaths(Path()).info.name
_CLUSTER_FILE = ClusterPaths(Path()).config.name
# Large folders without runs: a pod's own files, virtual environments, caches.
_SKIPPED = frozenset({"pods", "node_modules", "site-packages", "__pycache__"})


def find_runs(folder: Path, depth: int = _DEEPEST) -> Iterator[RunPaths]:
    """Return the run directories at or below a folder, the nearest first."""
    return (paths for paths in find_all(folder, depth) if isinstance(paths, RunPaths))


def find_all(
    folder: Path, depth: int = _DEEPEST, cpu_end_s: float = math.inf
) -> Iterator[RunPaths | ClusterPaths]:
    """Return directories of runs and clusters at or below a folder, nearest first.

    Run directories are not searched further. The search ends when the thread's CPU time, as
    `time.thread_time` counts it, reaches `cpu_end_s`.
    """
    pending = deque([(str(folder), 0)])
    while pending and time.thread_time() < cpu_end_s:
        place, level = pending.popleft()
        try:
            with os.scandir(place) as entries:
                inside = list(entries)
        except (OSError, ValueError):  # A path with a NUL is no folder.
            continue
        names = {entry.name for entry in inside}
        if _RUN_FILE in names:
            yield RunPaths(Path(place))
            continue
        if _CLUSTER_FILE in names:
            yield ClusterPaths(Path(place))
        if level < depth:
            for entry in inside:
                if _is_worth_it(entry):
                    pending.append((entry.path, level + 1))


def stamp_of(paths: RunPaths) -> str:
    """Return a stamp of a run's five record files: their times and sizes."""
    marks = []
    for path in (paths.info, paths.state, paths.result, paths.label, paths.benchmarks):
        try:
            facts = path.stat()
            marks.append(f"{facts.st_mtime_ns}.{facts.st_size}")
        except OSError:
            marks.append("")
    return "/".join(marks)


def _is_worth_it(entry: os.DirEntry[str]) -> bool:
    return (
        not entry.name.startswith(".")
        and entry.name not in _SKIPPED
        and entry.is_dir(follow_symlinks=False)
    )
