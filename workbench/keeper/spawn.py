"""A cluster's keeper as a process: how it is started, its lock, and its log with all secrets masked."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from workbench.base import child, entries, errors
from workbench.base.errors import (
    BackendError,
    ConfigError,
    PodError,
    PodTimeout,
    RunError,
    WorkbenchError,
)
from workbench.base.files.locks import no_locks_there
from workbench.base.files.private import make_cluster_folder
from workbench.base.lines import to_line
from workbench.base.process import boot_id, process_start_time
from workbench.base.redact import Redactor
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import write_cluster_state

STAY = b"stay\n"
"""Follows the spec on the keeper's standard input once its start is over."""
TAKEN = 75
"""Exit code of a keeper that found another one."""
_LOCK_S, _LOCK_LOOK_S = 0.5, 0.02
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Leash(io.FileIO):
    """What ties a keeper to its start: closed before `drop`, also by an interrupt or a death, it ends the keeper."""

    def __init__(self) -> None:
        self.far_end, near_end = os.pipe()
        super().__init__(near_end, "wb")

    def drop(self) -> None:
        with suppress(BrokenPipeError):  # it has ended
            self.write(STAY)


def spawn_keeper(paths: ClusterPaths, spec: ClusterSpec, leash: Leash) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, so that no signal meant for the notebook reaches it."""
    state = {"phase": "starting", "message": "starting the keeper"}
    _make_own_folder(paths)
    write_cluster_state(paths, state)
    lock = _make_lock(paths.own_keeper_lock)
    keeper = _start(paths, leash)
    # The lock is named from the start on: without it, nothing is removed where the keeper dies before its first word.
    write_cluster_state(paths, {**state, **process_facts(keeper.pid), "lock": lock})
    with suppress(BrokenPipeError):  # it has ended; whoever waits for it says how
        leash.write(to_line(spec.to_dict()))
    return keeper


def spawn_successor(paths: ClusterPaths, spec: ClusterSpec) -> subprocess.Popen[bytes]:
    """Start a keeper that takes over from one that died; it ends at once with `TAKEN` where another has."""
    with Leash() as leash:
        keeper = _start(paths, leash, "--takes-over")
        with suppress(BrokenPipeError):
            leash.write(to_line(spec.to_dict()))
        leash.drop()
    return keeper


def _start(paths: ClusterPaths, leash: Leash, *options: str) -> subprocess.Popen[bytes]:
    _make_own_folder(paths)
    with paths.keeper_log.open("ab") as log, os.fdopen(leash.far_end, "rb") as stdin:
        return child.start(
            "-m", entries.KEEPER, str(paths.root), *options, stdin=stdin, stdout=log, stderr=log
        )


def _make_own_folder(paths: ClusterPaths) -> None:
    try:
        make_cluster_folder(paths.root)
    except OSError as error:
        raise ConfigError(
            f"no folder for the keys of the cluster in {paths.root}: {error}; set XDG_STATE_HOME to a folder of yours"
        ) from error


def process_facts(pid: int) -> dict[str, object]:
    """Return what the state file names a keeper by."""
    return {
        "pid": pid,
        "start_time": process_start_time(pid),
        "boot": boot_id(),
        "host": socket.gethostname(),
    }


def start_error(state: Mapping[str, object], log: Path) -> WorkbenchError:
    """Make the error that ended the keeper's start, as it was raised there."""
    kind = getattr(errors, str(state.get("error")), PodError)
    message = str(state.get("message"))
    if kind is ConfigError:
        return ConfigError(message)
    message += f"\nThe keeper's log is {log}"
    return kind(message) if kind in (BackendError, PodTimeout) else PodError(message)


def take_lock(path: Path, inode: int | None = None) -> int | None:
    """Lock a cluster until this process ends; return the lock's inode, None where it is taken or is not `inode`."""
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if inode is None else 0)
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            handle = os.open(path, flags, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() > deadline:
                return None
            time.sleep(
                _LOCK_LOOK_S
            )  # it may have been somebody who only looks whether it is locked
            continue
        except OSError as error:
            raise RunError(f"{no_locks_there(path, error)}; another keeper may be there") from error
        locked = os.fstat(handle).st_ino
        if inode not in (None, locked):
            os.close(handle)
            raise RunError(
                f"{path} is not the lock of the keeper before: the directory is a copy, or was changed"
            )
        if inode_at(path) == locked:
            return locked  # the handle stays open for as long as the process lives
        os.close(handle)  # another file has its name by now


def _make_lock(path: Path) -> int:
    """Make the file that a keeper will lock, or take the one that is there; return its inode."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(handle).st_ino
    finally:
        os.close(handle)


def inode_at(path: Path) -> int | None:
    """Return the inode of a lock; None where there is none."""
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def log_to(path: Path) -> Redactor:
    """Write what this process logs into a file; return what masks it, to be told of more secrets."""
    redact = Redactor({name: os.environ.get(name, "") for name in _HUB_TOKENS})
    handler = logging.FileHandler(path)
    handler.setFormatter(_Masking(redact))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("paramiko").setLevel(logging.WARNING)
    # paramiko's transports write a traceback under these names for every login that fails. The error is raised as well,
    # and who tries again writes one line.
    for chatty in ("paramiko.transport", "workbench.pods.ssh.transport"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    return redact


class _Masking(logging.Formatter):
    def __init__(self, redact: Redactor):
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))
