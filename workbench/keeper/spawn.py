"""Start keeper processes, lock clusters, and mask secrets in the keeper's log."""

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
from workbench.base.files import records
from workbench.base.files.locks import no_locks_there
from workbench.base.files.records import facts_of
from workbench.base.messages.lines import to_line
from workbench.base.process import boot_id, process_start_time
from workbench.base.redact import Redactor
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import make_own_folder
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import write_cluster_state

STAY = b"stay\n"
"""Line on the keeper's standard input that confirms its start. Follows the spec."""
TAKEN = 75
"""Exit code of a keeper that found another keeper."""
_LOCK_S = 0.5
_LOCK_LOOK_S = 0.02
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Leash(io.FileIO):
    """Pipe from the starting process to the keeper. If closed before `drop`, the keeper ends.

    An interrupt or the death of the starting process also closes the pipe.
    """

    def __init__(self) -> None:
        self.far_end, near_end = os.pipe()
        super().__init__(near_end, "wb")

    def drop(self) -> None:
        self.send(STAY)

    def send(self, line: bytes) -> None:
        # If the keeper has ended, the waiting caller reports the reason.
        with suppress(BrokenPipeError):
            self.write(line)


def spawn_keeper(paths: ClusterPaths, spec: ClusterSpec, leash: Leash) -> subprocess.Popen[bytes]:
    """Start the keeper in its own session, so that signals for the notebook do not reach it."""
    state = {"phase": "starting", "message": "starting the keeper"}
    make_own_folder(paths)
    write_cluster_state(paths, state)
    keeper = _start(paths, leash)
    # Name the keeper at once. Otherwise, nothing is cleaned up if the keeper dies before its first
    # state.
    write_cluster_state(paths, {**state, **process_facts(keeper.pid)})
    leash.send(to_line(spec.to_dict()))
    return keeper


def spawn_successor(paths: ClusterPaths, spec: ClusterSpec) -> subprocess.Popen[bytes]:
    """Start a successor of a dead keeper. The process exits with `TAKEN` if another took over."""
    with Leash() as leash:
        keeper = _start(paths, leash, "--takes-over")
        leash.send(to_line(spec.to_dict()))
        leash.drop()
    return keeper


def _start(paths: ClusterPaths, leash: Leash, *options: str) -> subprocess.Popen[bytes]:
    make_own_folder(paths)
    with (
        records.open_to_append(paths.keeper_log) as log,
        os.fdopen(leash.far_end, "rb") as stdin,
    ):
        words = ["-m", entries.KEEPER, str(paths.root), *options]
        return child.start(*words, kind=child.Outliving, stdin=stdin, stdout=log, stderr=log)


def process_facts(pid: int) -> dict[str, object]:
    """Return the facts that identify a keeper process in the state file."""
    return {
        "pid": pid,
        "start_time": process_start_time(pid),
        "boot": boot_id(),
        "host": socket.gethostname(),
    }


def start_error(state: Mapping[str, object], log: Path) -> WorkbenchError:
    """Rebuild the error that ended the keeper's start."""
    kind = getattr(errors, str(state.get("error")), PodError)
    message = str(state.get("message"))
    if kind is ConfigError:
        return ConfigError(message)
    message += f"\nThe keeper's log is {log}"
    return kind(message) if kind in (BackendError, PodTimeout) else PodError(message)


def take_lock(path: Path) -> bool:
    """Lock a cluster until the process ends. Return False if another process has the lock.

    Raise RunError if the file cannot be locked.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            handle = os.open(path, flags, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            if time.monotonic() > deadline:
                return False
            # Another process may be testing the lock.
            time.sleep(_LOCK_LOOK_S)
            continue
        except OSError as error:
            raise RunError(f"{no_locks_there(path, error)}; another keeper may be there") from error
        # The name may belong to another file by now, or to none.
        named = facts_of(path)
        if named is not None and os.path.samestat(named, os.fstat(handle)):
            return True  # The handle stays open until the process ends.
        os.close(handle)


def log_to(path: Path) -> Redactor:
    """Write the log of this process to a file. Return the redactor, for further secrets."""
    redact = Redactor({name: os.environ.get(name, "") for name in _HUB_TOKENS})
    handler = logging.FileHandler(path)
    handler.setFormatter(_Masking(redact))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("paramiko").setLevel(logging.WARNING)
    # paramiko's transports log a traceback under these names for every failed login. The error is
    # also raised, and every retry logs a line.
    for chatty in ("paramiko.transport", "workbench.pods.ssh.transport"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    return redact


class _Masking(logging.Formatter):
    def __init__(self, redact: Redactor):
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")
        self._redact = redact

    def format(self, record: logging.LogRecord) -> str:
        return self._redact(super().format(record))
