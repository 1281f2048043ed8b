"""The register of the user's clusters, in the private folder of every cluster.

A cluster's directory is data: a colleague may have given the directory, or pods may share it. Only
a registered cluster is taken over, cleaned up, logged into or signalled.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import read_json, read_known, write_json
from workbench.base.files.locks import is_locked
from workbench.base.files.private import (
    cluster_folder,
    clusters_folder,
    make_cluster_folder,
    state_folder,
    user_key,
)
from workbench.base.files.sealed import (
    Moved,
    NotSealed,
    canonical,
    place_text,
    read_sealed,
    write_sealed,
)
from workbench.base.process import boot_id
from workbench.rundir.paths import REGISTRATION, ClusterPaths

logger = logging.getLogger(__name__)
SPEC = "cluster"
"""Purpose of the seal of a cluster's stored specification."""
_CLOSED = "closed.json"
"""Name of the entry of a closed cluster, which registers nothing."""
_PRUNE_S = 3600.0  # a start that makes its folder now is younger
_LIVE_PHASES = ("starting", "ready", "closing", "lost")
_REMEDY = "The folder is only shown. Start a cluster with another path"


class NotRegistered(RunError):
    """Report a directory that is data, without a cluster started there by the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A cluster started by the user on this machine."""

    path: str
    """Real path of the cluster's directory."""
    inode: int
    """Inode of the cluster's directory."""
    device: int
    """Device of the cluster's directory; the number is valid until the machine restarts."""
    boot: str
    """Boot id of this machine at the start of the cluster."""
    backend: str
    """Kind of the pods' place."""
    digest: str
    """SHA-256 of the stored specification."""


def register(paths: ClusterPaths, stored: Mapping[str, object]) -> None:
    """Enter a starting cluster, and write the specification with a seal.

    Args:
        paths: The cluster's existing directory.
        stored: The JSON form of the specification, without values of variables.

    Raises:
        ConfigError: The private folder or the user's key cannot be made.
        OSError: The directory takes no file.
    """
    make_own_folder(paths)
    try:
        user_key()
    except OSError as error:
        raise ConfigError(
            f"no key for the seals of your clusters in {state_folder()}: {error.strerror}; "
            "set XDG_STATE_HOME to a folder of yours, on a file system with flock"
        ) from error
    facts = paths.root.stat()
    backend = stored.get("backend")
    kind = backend.get("kind") if isinstance(backend, Mapping) else None
    entry = {
        "path": place_text(paths.root),
        "inode": facts.st_ino,
        "device": facts.st_dev,
        "boot": boot_id(),
        "backend": str(kind),
        "digest": _digest(stored),
    }
    write_json(paths.own_registration, entry)
    paths.own_registration.with_name(_CLOSED).unlink(missing_ok=True)
    write_sealed(paths.config, stored, purpose=SPEC, root=paths.root)


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
        facts = paths.root.stat()
    except OSError as error:
        raise NotRegistered(f"{cluster} cannot be found: {error.strerror}") from error
    if not _is_place_of(entry, facts):
        raise NotRegistered(
            f"{cluster} is not the folder that its cluster started in: "
            f"another folder was put in the place. {_REMEDY}"
        )
    # The specification names the place of the pods, its keys and options.
    try:
        stored = read_sealed(paths.config, purpose=SPEC, root=paths.root)
    except NotSealed as error:
        raise NotRegistered(f"{error}. {_REMEDY}") from error
    if _digest(stored) != entry.digest:
        raise NotRegistered(
            f"{paths.config} is the file of an earlier cluster in the folder. {_REMEDY}"
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
    return _entry_of(read_known(ClusterPaths(cluster).own_registration))


def _entry_of(raw: Mapping[str, object]) -> Registration | None:
    inode = raw.get("inode")
    device = raw.get("device")
    if not isinstance(inode, int) or not isinstance(device, int):
        return None
    return Registration(
        path=str(raw.get("path")),
        inode=inode,
        device=device,
        boot=str(raw.get("boot")),
        backend=str(raw.get("backend")),
        digest=str(raw.get("digest")),
    )


def unregister(cluster: Path) -> None:
    """Remove the entry of a closed cluster, with nothing left of the pods. Idempotent.

    The private folder keeps the path, so `prune` can notice a missing directory.
    """
    entry = ClusterPaths(cluster).own_registration
    with suppress(FileNotFoundError):
        entry.replace(entry.with_name(_CLOSED))


def is_tidied(cluster: Path) -> bool:
    """Whether the cluster of a directory is closed, with nothing left of the pods."""
    entry = ClusterPaths(cluster).own_registration
    if registration(cluster) is not None:
        return False
    closed = _entry_of(read_json(entry.with_name(_CLOSED)))
    try:
        return closed is not None and _is_place_of(closed, cluster.stat())
    except OSError:
        return False


def prune() -> None:
    """Remove the private folders of clusters with missing directories. Never raises."""
    try:
        folders = list(clusters_folder().iterdir())
    except OSError:
        return
    for folder in folders:
        with suppress(OSError):
            if _is_over(folder):
                shutil.rmtree(folder)
                logger.info("%s is removed: the directory of its cluster is gone", folder)


def _is_over(folder: Path) -> bool:
    """Whether the cluster of a private folder has no directory and no keeper any more."""
    raw = read_json(folder / REGISTRATION) or read_json(folder / _CLOSED)
    path = Path(str(raw.get("path")))
    # An escaped byte is no part of the name: such a path cannot be looked up.
    if not raw or cluster_folder(path) != folder or os.path.lexists(path):
        return False
    # The folder above is there, on the same disk: the disk is not merely unmounted.
    try:
        above = path.parent.stat()
    except OSError:
        return False
    is_same_disk = raw.get("boot") == boot_id() and above.st_dev == raw.get("device")
    newest_s = max(each.lstat().st_mtime for each in folder.iterdir())
    is_young = time.time() - newest_s < _PRUNE_S
    return is_same_disk and not is_young and not is_locked(ClusterPaths(path).keeper_lock)


def _is_place_of(entry: Registration, facts: os.stat_result) -> bool:
    if entry.inode != facts.st_ino:
        return False
    # Numbers of network and union file systems (major 0) change with each mount.
    is_lasting = entry.boot == boot_id() and os.major(entry.device) != 0
    return not is_lasting or entry.device == facts.st_dev


def _why_unknown(paths: ClusterPaths) -> str:
    """Return why a directory has no registration at the path."""
    with suppress(WorkbenchError):
        try:
            read_sealed(paths.config, purpose=SPEC, root=paths.root)
            return f"the cluster in {paths.root} was closed and tidied up"
        except Moved as error:
            return str(error)
    return (
        f"{paths.root} holds no cluster that you started on this machine: another "
        "person or another machine wrote the folder. "
        "If pods of the cluster still run, end the pods on their platform"
    )


def _digest(stored: Mapping[str, object]) -> str:
    return hashlib.sha256(canonical(stored)).hexdigest()
