"""Take a directory for a run or a cluster; of several that try at once, one gets it and the others are refused."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from workbench.base.errors import ConfigError, DiskFull
from workbench.base.files import read_json, write_json
from workbench.base.files.disk import check_room, full_disk_named
from workbench.base.files.folders import make_private
from workbench.base.process import is_alive, process_start_time
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.status import cluster_status

_CLUSTER_BYTES = 1 << 20  # what a cluster writes there in any case
_LAST_STEPS_S = 10.0  # from a keeper's last word to its end


def fresh_folder(root: Path, mark: Path) -> None:
    """Make a directory that must be new or empty, and take it by making its mark, an empty file."""
    _make(root)
    if mark.exists():
        raise ConfigError(_taken(root, mark))
    if any(root.iterdir()):
        raise ConfigError(f"{root} is not empty; choose a new directory")
    try:
        with full_disk_named(root):
            mark.touch(mode=0o600, exist_ok=False)
    except FileExistsError:  # by someone who came at the same time
        raise ConfigError(_taken(root, mark)) from None


@contextlib.contextmanager
def claimed(paths: ClusterPaths) -> Iterator[None]:
    """Have a cluster's directory to oneself, to start a keeper: one that is new, empty, or of a cluster that ended."""
    root = paths.root
    _make(root)
    try:
        check_room(root, _CLUSTER_BYTES)
    except DiskFull:
        with contextlib.suppress(OSError):  # not empty: an earlier cluster's
            root.rmdir()
        raise
    if not paths.config.exists() and {path.name for path in root.iterdir()} - {paths.lock.name}:
        raise ConfigError(f"{root} is not empty; choose a new directory")
    with paths.lock.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{root} is being taken by another start at this moment; {_hint(root)}") from None
        if _is_in_use(root):
            raise ConfigError(occupied(root))
        holder = {"pid": os.getpid(), "start_time": process_start_time(os.getpid()), "user": getpass.getuser()}
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        write_json(paths.holder, {**holder, "host": socket.gethostname(), "time": when})
        yield


def _is_in_use(root: Path) -> bool:
    deadline = time.monotonic() + _LAST_STEPS_S
    while (status := cluster_status(root)).phase in ("closed", "failed") and status.alive:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return status.alive or status.phase == "lost"


def occupied(root: Path) -> str:
    """Return which cluster a directory holds, who started it and how to use it, for people."""
    return f"{root} holds a cluster that is {cluster_status(root).phase}: {_holder(root)}; {_hint(root)}"


def _holder(root: Path) -> str:
    match read_json(ClusterPaths(root).holder):
        case {"pid": int(pid), "start_time": int() | None as since, "user": user, "host": host, "time": when}:
            alive = is_alive(pid, since) or host != socket.gethostname()
            return f"process {pid} of {user} on {host}{'' if alive else ', which has ended,'} started it at {when}"
    return "who started it is not known"


def _make(root: Path) -> None:
    try:
        with full_disk_named(root):
            make_private(root)
    except DiskFull:
        raise
    except OSError as error:
        raise ConfigError(f"cannot make the directory {root}: {error.strerror or error}") from error


def _taken(root: Path, mark: Path) -> str:
    return f"{root} already holds a run or a cluster ({mark.name}); choose another directory"


def _hint(root: Path) -> str:
    return f"use it with Cluster.attach({str(root)!r}), or choose another path"
