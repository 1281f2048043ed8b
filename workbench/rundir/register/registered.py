"""The register of the user's clusters and their runs: the stores in the private folders.

A cluster's directory is data: a colleague may have given the directory, or pods may share it. Only
a registered cluster is taken over, cleaned up, logged into or signalled.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, Unreadable, WorkbenchError
from workbench.base.files import is_missing, is_there, not_ours, read_json, read_known, write_json
from workbench.base.files.locks import is_locked
from workbench.base.files.private import cluster_folder, clusters_folder, make_cluster_folder
from workbench.base.json_values import as_str
from workbench.base.process import boot_id
from workbench.rundir.paths import LOCK, STORE, ClusterPaths, RunPaths
from workbench.rundir.register.store import (
    KnownRun,
    Registration,
    close_store,
    create_store,
    known_runs,
    registration_in,
    runs_in,
)
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)
_PRUNE_S = 3600.0  # a start that makes its folder now is younger
_FORGET_S = 30 * 86_400.0  # from the last write to a folder that no cluster needs any more
_REMEDY = "The folder is only shown. Start a cluster with another path"


class NotRegistered(RunError):
    """Report a directory that is data, without a cluster started there by the user."""


def register(
    paths: ClusterPaths,
    stored: Mapping[str, object],
    started: Mapping[str, object] | None = None,
) -> None:
    """Enter a starting cluster, and write its specification into its directory for readers.

    Args:
        paths: The cluster's existing directory.
        stored: The JSON form of the specification, without values of variables.
        started: Who starts the cluster, for readers of the directory.

    Raises:
        ConfigError: The private folder takes no store.
        OSError: The directory takes no file.
    """
    make_own_folder(paths)
    facts = paths.root.stat()
    entry = Registration(
        path=_place_text(paths.root),
        inode=facts.st_ino,
        device=facts.st_dev,
        boot=boot_id(),
        # As a reader gets it: keys are texts there, and paths too.
        spec=json.loads(json.dumps(stored, default=str)),
    )
    try:
        create_store(paths.store, entry)
    except OSError as error:
        raise ConfigError(str(error)) from error
    write_json(paths.config, {**entry.spec, "started": started or {}})


def make_own_folder(paths: ClusterPaths) -> None:
    """Make the private folder of a cluster. Raises ConfigError."""
    try:
        make_cluster_folder(paths.root)
    except OSError as error:
        raise ConfigError(
            f"no folder for the keys of the cluster in {paths.root}: "
            f"{error}; set XDG_STATE_HOME to a folder of yours"
        ) from error


def registered(cluster: Path) -> Registration:
    """Return the registration of the cluster in a directory. Every action on a cluster asks here.

    Raises:
        NotRegistered: The directory is data. The message has the reason.
        RunError: The files cannot be read at the moment.
        ConfigError: Other users may know the user's key.
    """
    paths = ClusterPaths(cluster)
    entry = registration(cluster)
    if entry is None:
        raise NotRegistered(f"{_why_unknown(paths)}. {_REMEDY}")
    # The directory is the one that the cluster started in, not a copy in its place.
    try:
        foreign = not_ours(paths.store)
        facts = paths.root.stat()
    except OSError as error:
        raise NotRegistered(f"{cluster} cannot be found: {error.strerror}") from error
    if foreign:
        raise NotRegistered(f"{foreign}. {_REMEDY}")
    if not _is_place_of(entry, facts):
        raise NotRegistered(
            f"{cluster} is not the folder that its cluster started in: "
            f"another folder was put in the place. {_REMEDY}"
        )
    return entry


def why_not_registered(cluster: Path) -> str:
    """Return why nothing may be done for the cluster in a directory, or "" if all may be."""
    try:
        registered(cluster)
    except WorkbenchError as error:
        return str(error)
    return ""


def registration(cluster: Path) -> Registration | None:
    """Return the entry for a path, also without the directory. None: no entry.

    Raise Unreadable if the entry cannot be read at the moment.
    """
    entry = registration_in(ClusterPaths(cluster).store)
    return None if entry is None or entry.is_closed else entry


def unregister(cluster: Path) -> None:
    """Close the entry of a cluster with nothing left of the pods. Idempotent.

    The store keeps the path, so `prune` can notice a missing directory.
    """
    close_store(ClusterPaths(cluster).store)


def is_tidied(cluster: Path) -> bool:
    """Whether the cluster of a directory is closed, with nothing left of the pods."""
    entry = registration_in(ClusterPaths(cluster).store)
    try:
        return entry is not None and entry.is_closed and _is_place_of(entry, cluster.stat())
    except OSError:
        return False


def cluster_of(paths: RunPaths) -> Path:
    """Return the cluster named by a trusted record of a run, or else the run's own directory.

    Every cluster has a store of its own, so the record says which store is asked for the run. The
    record is trusted alone if the cluster lies beside the run: a reader on another machine, or of
    another person's directory, has no store. A run that still waits for its keeper is in no store.
    """
    try:
        return known_cluster_of(paths)
    except Unreadable:
        return paths.root


def known_cluster_of(paths: RunPaths) -> Path:
    """Return the cluster as `cluster_of` does.

    Raise Unreadable if files cannot be read at the moment.
    """
    named = Path(as_str(read_known(paths.info).get("cluster")) or paths.root)
    if "\0" in str(named):  # no path contains a NUL
        return paths.root
    is_missing(named)  # raises for an unreadable folder, which would seem to be missing below
    if _is_with(named, paths.root):
        return named
    # No keeper has accepted or refused the run yet.
    on_its_way = is_own(paths.root) and not was_taken(paths)
    if is_own(named) and (on_its_way or _is_in(known_runs(ClusterPaths(named).store), paths)):
        return named
    return paths.root


def is_listed(paths: RunPaths, cluster: Path) -> bool:
    return _is_in(runs_in(ClusterPaths(cluster).store), paths)


def refuse_another(path: Path, run_id: str, cluster: Path) -> None:
    """Raise RunError if a cluster has the run of that id in another directory.

    A given directory may name any id, also the id of a live run of the reader. An id that the
    cluster does not list is allowed: the run may be on its way to the keeper.

    Raises:
        Unreadable: The cluster's store cannot be read at the moment.
        RunError: The cluster lists the id with another directory.
    """
    root = os.path.realpath(path)
    for each in known_runs(ClusterPaths(cluster).store):
        if each.id == run_id and os.path.realpath(each.path) != root:
            raise RunError(
                f"{path} names run {run_id} of the cluster {cluster}, and the cluster has "
                f"that run in {each.path}; open the run there: Run.load({str(each.path)!r})"
            )


def _is_in(runs: Sequence[KnownRun], paths: RunPaths) -> bool:
    run_id = read_json(paths.info).get("id")
    root = os.path.realpath(paths.root)
    try:
        return any(each.id == run_id and os.path.realpath(each.path) == root for each in runs)
    except ValueError:  # a path that holds a NUL
        return False


def own_runs(cluster: Path) -> list[KnownRun]:
    """Return a cluster's runs whose own record names the cluster.

    Another run may be in a run's directory by now. Only the returned runs may be written to.
    """
    return [run for run in runs_in(ClusterPaths(cluster).store) if is_run_of(run, cluster)]


def is_run_of(run: KnownRun, cluster: Path) -> bool:
    """Whether the record in a run's directory names the run and the cluster by full paths."""
    try:
        info = read_json(RunPaths(run.path).info)
        named = Path(as_str(info.get("cluster")))
        is_full = run.path.is_absolute() and named.is_absolute()  # a relative path is a guess
        return (
            is_full
            and info.get("id") == run.id
            and os.path.realpath(named) == os.path.realpath(cluster)
        )
    except ValueError:  # a path that holds a NUL
        return False


def is_own(folder: Path) -> bool:
    """Whether a folder exists and belongs to the user."""
    try:
        return folder.stat().st_uid == os.getuid()
    except (OSError, ValueError):
        return False


def _is_with(cluster: Path, run: Path) -> bool:
    paths = ClusterPaths(Path(os.path.realpath(cluster)))
    below = run.parent == paths.runs and is_there(paths.config)
    return below or paths.root in (run, run / "cluster")  # the command line uses the second


def was_taken(paths: RunPaths) -> bool:
    """Whether a keeper has taken a run. The keeper then writes more than the state `queued`."""
    raw = read_json(paths.state)
    return raw.get("state") != RunState.QUEUED or "wish" in raw


def prune() -> None:
    """Remove private folders without a use. Never raises.

    A folder is without a use a month after the end of the cluster, or without the cluster's
    directory. A cluster without an end keeps the folder as long as the directory exists.
    """
    try:
        folders = list(clusters_folder().iterdir())
    except OSError:
        return
    for folder in folders:
        try:
            if _is_over(folder):
                shutil.rmtree(folder)
                logger.info("%s is removed: no cluster needs the folder any more", folder)
        except (OSError, WorkbenchError) as error:
            logger.info("%s stays: %s", folder, error)


def _is_over(folder: Path) -> bool:
    """Whether no cluster needs a private folder any more."""
    entry = registration_in(folder / STORE)
    newest_s = max(each.lstat().st_mtime for each in (folder, *folder.iterdir()))
    age_s = time.time() - newest_s
    if entry is not None and _is_gone(entry, folder):
        return age_s > _PRUNE_S and not is_locked(folder / LOCK)
    # Without an entry, a start was broken off, or nothing tells of the cluster any more.
    is_needed = entry is not None and not entry.is_closed and _may_be_there(entry, folder)
    return age_s > _FORGET_S and not is_needed and not is_locked(folder / LOCK)


def _may_be_there(entry: Registration, folder: Path) -> bool:
    """Whether the directory of a cluster exists, or cannot be looked up."""
    path = Path(entry.path)
    # An escaped byte is no part of the name.
    return cluster_folder(path) != folder or os.path.lexists(path)


def _is_gone(entry: Registration, folder: Path) -> bool:
    """Whether the directory of a cluster was removed, and its disk is not merely unmounted."""
    if _may_be_there(entry, folder):
        return False
    try:
        above = Path(entry.path).parent.stat()
    except OSError:
        return False
    return entry.boot == boot_id() and above.st_dev == entry.device


def _is_place_of(entry: Registration, facts: os.stat_result) -> bool:
    if entry.inode != facts.st_ino:
        return False
    # Numbers of network and union file systems (major 0) change with each mount.
    is_lasting = entry.boot == boot_id() and os.major(entry.device) != 0
    return not is_lasting or entry.device == facts.st_dev


def _why_unknown(paths: ClusterPaths) -> str:
    """Return why a directory has no registration at the path."""
    with suppress(WorkbenchError):
        if registration_in(paths.store) is not None:
            return f"the cluster in {paths.root} was closed and tidied up"
    if os.path.lexists(paths.store):
        return (
            f"{paths.store} is damaged, and does not tell whose the cluster in {paths.root} is. "
            "If pods of the cluster still run, end the pods on their platform"
        )
    return (
        f"{paths.root} holds no cluster that you started on this machine: another "
        "person or another machine wrote the folder, or the folder was copied or moved. "
        "If pods of the cluster still run, end the pods on their platform"
    )


def _place_text(root: Path) -> str:
    """Return the real path of a directory as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(os.path.realpath(root)).decode(errors="backslashreplace")
