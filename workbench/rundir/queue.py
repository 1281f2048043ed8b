"""The runs that a cluster's keeper was handed, in order, and the cluster that a run belongs to.

The queue is what another keeper goes on with where one died, and what says that a cluster knows a run which names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base.files import is_there, read_bytes, read_json, write_text
from workbench.base.json_values import text
from workbench.rundir.paths import ClusterPaths, RunPaths


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedRun:
    """One run that was handed over; its own directory says how far it is."""

    id: str
    path: Path


_RUNS = TypeAdapter(list[QueuedRun])


def read_queue(path: Path) -> list[QueuedRun]:
    """Read the runs; none where there is no such file, or a broken one."""
    try:
        return _RUNS.validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return []


def write_queue(path: Path, runs: Sequence[QueuedRun]) -> None:
    write_text(path, json.dumps([{"id": run.id, "path": str(run.path)} for run in runs], indent=1) + "\n")


def cluster_of(paths: RunPaths) -> Path:
    """Return the cluster that a run names, if it lies with it or is this user's and knows it; else the run's own."""
    named = Path(text(read_json(paths.info).get("cluster")) or paths.root)
    if _is_with(named, paths.root) or (is_own(named) and is_listed(paths, named)):
        return named
    return paths.root


def is_listed(paths: RunPaths, cluster: Path) -> bool:
    run_id, root = read_json(paths.info).get("id"), os.path.realpath(paths.root)
    try:
        runs = read_queue(ClusterPaths(cluster).queue)
        return any(each.id == run_id and os.path.realpath(each.path) == root for each in runs)
    except ValueError:  # a path that holds a NUL
        return False


def is_own(folder: Path) -> bool:
    """Whether a folder is there and this user's."""
    try:
        return folder.stat().st_uid == os.getuid()
    except (OSError, ValueError):
        return False


def _is_with(cluster: Path, run: Path) -> bool:
    paths = ClusterPaths(Path(os.path.realpath(cluster)))
    below = run.parent == paths.runs and is_there(paths.config)
    return below or paths.root in (run, run / "cluster")  # the second is the command line's
