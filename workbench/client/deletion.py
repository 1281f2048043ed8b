"""Delete the directory of a run that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, Unreadable
from workbench.base.files import records
from workbench.base.files.folders import remove_empty, remove_file, remove_folder
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.figures.metrics import less_is_better
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.spec import RunSpec
from workbench.rundir.status import cluster_status, id_of, state_of

__all__ = ["all_but_best", "bytes_of_run", "delete_run"]


def bytes_of_run(root: Path) -> int:
    """Return the bytes of the files in a run directory. 0: it cannot be read.

    Files behind links count nothing: a deletion removes the link alone.
    """
    try:
        return sum(records.size_of(path) for path in records.files_below(root))
    except OSError:
        return 0


def delete_run(paths: RunPaths) -> list[str]:
    """Remove a run directory, the record of the run last. Return notes on what is elsewhere.

    Raises:
        RunError: The run has not ended, the directory has a cluster with pods, or a part stays.
    """
    state = state_of(paths)
    run_id = id_of(paths)
    if not state.is_terminal:
        raise RunError(
            f"run {run_id} is {state}. Only an ended run can be deleted: cancel it first"
        )
    cluster = ClusterPaths(paths.root / "cluster")
    if cluster_status(cluster.root).alive:
        raise RunError(
            f"{paths.root} has the cluster of the run, and its pods are up. "
            "Close the cluster, then delete the run"
        )
    notes = _elsewhere(paths)
    # The record of the run goes last, so that an interrupted deletion can be repeated.
    for path in set(paths.root.iterdir()) - {paths.info}:
        if not remove_file(path):
            remove_folder(path)
    left = set(paths.root.iterdir()) - {paths.info}
    if left or not (remove_file(paths.info) and remove_empty(paths.root)):
        raise RunError(
            f"{paths.root} could not be removed whole. Look at the rights of what is left there"
        )
    return notes


def all_but_best(
    runs: Sequence[RunRecord], figures: Sequence[object], count: int, by: str
) -> list[Path]:
    """Return the directories of ended runs that have the figure, without the best.

    Raises:
        ConfigError: The number is below 1, or no run has the figure.
    """
    if count < 1:
        raise ConfigError(f"keep_best({count}) would delete all runs. Give a number from 1")
    known = []
    for run, figure in zip(runs, figures, strict=True):
        if run.state.is_terminal and isinstance(figure, int | float):
            known.append((figure, run.path))
    if not known:
        raise ConfigError(f"no ended run has the figure {by!r}, so no run is the best")
    known.sort(reverse=not less_is_better(by))
    return [path for _, path in known[count:]]


def _elsewhere(paths: RunPaths) -> list[str]:
    """Return a note on the folder or store of the run's checkpoints, which may have its model."""
    try:
        job = RunSpec.load(paths.spec, of_run=True).job.to_dict()
    except (RunError, ConfigError, Unreadable):
        return []
    where = str(job.get("checkpoints") or "")
    if "/" in where:
        return [f"the files of the run in {where} stay"]
    return []
