"""Start a cluster's keeper and wait for the pods; close the cluster and wait for the end."""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from workbench.base.display_protocol import Draw
from workbench.base.errors import ConfigError, DiskFull, PodError, RunError, WorkbenchError
from workbench.base.files import read_json, records
from workbench.base.files.disk import check_room
from workbench.base.files.folders import remove_empty
from workbench.base.files.locks import no_locks_there
from workbench.base.messages.wire import ask_if_there
from workbench.base.process import Process, is_alive, process_start_time
from workbench.client.takeover import (
    end_broken_off,
    not_to_be_tidied,
    obstacle,
    take_over,
    unfinished_runs,
)
from workbench.keeper.spawn import Leash, spawn_keeper, start_error
from workbench.pods.backends import remove_left
from workbench.pods.ssh.identity import Identity
from workbench.rundir.make.prepare import make_root
from workbench.rundir.paths import ClusterPaths
from workbench.rundir.register.registered import (
    is_tidied,
    make_own_folder,
    prune,
    register,
    registered,
    registration,
    unregister,
    why_not_registered,
)
from workbench.rundir.spec import ClusterSpec
from workbench.rundir.status import (
    UNKNOWN,
    ClusterStatus,
    cluster_status,
    keeper_process,
    settled_status,
)

logger = logging.getLogger(__name__)
_CLUSTER_BYTES = 1 << 20  # least bytes that a cluster writes to its directory
_LAST_STEPS_S = 10.0  # from a keeper's last message to its end
_CLOSE_S = 40.0
_LOOK_S = 0.05


def spawn(paths: ClusterPaths, spec: ClusterSpec, leash: Leash) -> subprocess.Popen[bytes]:
    """Start the keeper in a directory: new, empty or of an ended cluster."""
    _check_platform()
    root = paths.root
    make_root(root)
    try:
        check_room(root, _CLUSTER_BYTES)
    except DiskFull:
        remove_empty(root)  # else the directory of an earlier cluster
        raise
    # A start makes the lock before any other file. Without a lock, the files are not a cluster's,
    # and no lock is made beside them.
    if any(root.iterdir()) and not (paths.lock.exists() or paths.config.exists()):
        raise ConfigError(_foreign(root))
    with records.open_to_append(paths.lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{root} is being taken by another start at this moment; {_hint(root)}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{no_locks_there(paths.lock, error)}; nothing has started"
            ) from error
        if not paths.config.exists() and any(each != paths.lock for each in root.iterdir()):
            raise ConfigError(_foreign(root))
        # Without access to the folder, the state of the directory would be unknown.
        make_own_folder(paths)
        if _is_in_use(root):
            raise ConfigError(occupied(root))
        started = {
            "pid": os.getpid(),
            "start_time": process_start_time(os.getpid()),
            "user": _user(),
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            # Jupyter names the notebook of a kernel in this variable.
            "notebook": Path(os.environ.get("JPY_SESSION_NAME", "")).name,
        }
        register(paths, _stored(spec), started)
        prune()
        return spawn_keeper(paths, spec, leash)


def _user() -> str:
    """Return a name for people: in a container, a user id may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
        return f"user id {os.geteuid()}"


def _foreign(root: Path) -> str:
    return f"{root} is not empty; choose a new directory"


def _check_platform() -> None:
    """Raise on a system other than Linux: keeper and agents find their processes in /proc."""
    if sys.platform != "linux":
        raise ConfigError(
            "DeepSpeed Workbench runs on Linux only, and this system is "
            f"{sys.platform}. Start JupyterLab in the containers of "
            "docker/compose.yaml, or use a JupyterLab on a Linux machine"
        )


def _is_in_use(root: Path) -> bool:
    deadline = time.monotonic() + _LAST_STEPS_S
    while (status := cluster_status(root)).phase in ("closed", "failed") and status.alive:
        if time.monotonic() > deadline:
            return True
        time.sleep(_LOOK_S)
    return status.alive or status.phase == "lost"


def occupied(root: Path) -> str:
    """Return a message on the cluster in a directory: state, owner and the way to use it."""
    return (
        f"{root} holds a cluster that is "
        f"{cluster_status(root).phase}: {_started_by(root)}; {_hint(root)}"
    )


def _started_by(root: Path) -> str:
    match read_json(ClusterPaths(root).config).get("started"):
        case {
            "pid": int(pid),
            "start_time": int() | None as since,
            "user": user,
            "host": host,
            "time": when,
        }:
            alive = is_alive(pid, since) or host != socket.gethostname()
            return (
                f"process {pid} of {user} on "
                f"{host}{'' if alive else ', which has ended,'} started it at {when}"
            )
    return "who started it is not known"


def _hint(root: Path) -> str:
    return f"use it with Cluster.attach({str(root)!r}), or choose another path"


def is_left(paths: ClusterPaths, spec: ClusterSpec) -> bool:
    """Whether the directory has the cluster and the keeper died. ConfigError: another cluster."""
    if (
        end_broken_off(paths.root)
        or settled_status(paths.root).phase != "lost"
        or obstacle(paths.root)
    ):
        return False
    if not _is_same(paths, spec):
        raise ConfigError(
            f"{paths.root} holds a cluster that was asked to be "
            f"another, and whose keeper died; {_hint(paths.root)}"
        )
    return True


def waits_in_queue(paths: ClusterPaths, spec: ClusterSpec) -> bool:
    """Whether the directory has the same cluster of this user, whose pods wait in a queue."""
    status = settled_status(paths.root)
    is_waiting = status.alive and status.phase == "starting" and not status.pods
    return spec.has_queue and is_waiting and _is_same(paths, spec)


def _is_same(paths: ClusterPaths, spec: ClusterSpec) -> bool:
    same: bool = registered(paths.root).spec == json.loads(json.dumps(_stored(spec)))
    return same


def _stored(spec: ClusterSpec) -> dict[str, object]:
    pods = {**spec.pods.to_dict(), "env": dict.fromkeys(spec.pods.env, "…")}
    return {**spec.to_dict(), "pods": pods}


def await_successor(paths: ClusterPaths, spec: ClusterSpec, draw: Draw) -> None:
    """Wait until a new keeper has found the pods of a dead keeper."""
    deadline = time.monotonic() + spec.step_limit_s + spec.lease_s
    while (status := cluster_status(paths.root)).phase in (
        "starting",
        UNKNOWN,
    ) and time.monotonic() < deadline:
        draw()
        time.sleep(_LOOK_S)
    if status.phase != "ready":
        raise RunError(
            f"the cluster in {paths.root} is {status.phase}: "
            f"{status.message}; see {paths.keeper_log}"
        )


def await_keeper(paths: ClusterPaths, keeper: subprocess.Popen[bytes]) -> None:
    """Wait until a new keeper takes runs, or raise the error that ended the keeper."""
    while keeper.poll() is None:
        if ask_if_there(paths.socket, {"op": "status"}, timeout_s=2.0) is not None:
            return
        time.sleep(_LOOK_S)
    raise start_error(read_json(paths.known_state), paths.keeper_log)


def await_ready(
    paths: ClusterPaths,
    spec: ClusterSpec,
    keeper: subprocess.Popen[bytes] | None,
    draw: Draw,
    is_given_up: Callable[[], bool],
) -> None:
    """Wait until the pods are ready, or raise the error that ended the start.

    `keeper` is the process that this process started; None: another process did.
    """
    limit_s = spec.start_limit_s + 30
    deadline = time.monotonic() + limit_s
    message = ""
    while (status := cluster_status(paths.root)).phase in (
        "starting",
        UNKNOWN,
    ) and not is_given_up():
        draw()
        # The keeper applies the time limit itself, and waits longer while images are pulled.
        if status.message != message:
            deadline = time.monotonic() + limit_s
            message = status.message
        ended = keeper.poll() if keeper is not None else None
        if ended is not None and cluster_status(paths.root).phase == "starting":
            raise PodError(f"the keeper ended with {ended}; see {paths.keeper_log}")
        if time.monotonic() > deadline:
            raise PodError(
                f"the cluster is still starting: {status.message}; see {paths.keeper_log}"
            )
        time.sleep(_LOOK_S)
    if is_given_up():  # by another thread
        raise PodError("the cluster was closed during its start")
    if status.phase != "ready":
        # The keeper writes the state for the user's programs last; it may lag behind.
        raise start_error(read_json(paths.known_state), paths.keeper_log)


def keep_from_idling(paths: ClusterPaths) -> None:
    """Report to the keeper: a notebook still shows the cluster. Never raises."""
    ask_if_there(paths.socket, {"op": "status"}, timeout_s=2.0)


def _end_unfinished(paths: ClusterPaths, spec: ClusterSpec) -> None:
    """Let a new keeper end the runs of a dead keeper; warn if there can be none."""
    try:
        take_over(paths.root, spec)
        await_successor(paths, spec, lambda *_: None)
    except WorkbenchError as error:
        words = (
            f"the unfinished runs of {paths.root} get no result, and their files are not "
            f"copied back: {error}"
        )
        warnings.warn(words, RuntimeWarning, stacklevel=4)


def close_cluster(paths: ClusterPaths, spec: ClusterSpec) -> None:
    """Close the cluster by the keeper, or remove a dead keeper's leftovers. See `Cluster.close`."""
    keeper = settled_status(paths.root)
    # The directory is gone or damaged: the process table has the keeper of a registered cluster.
    process = None
    if keeper.pid is None and registration(paths.root) is not None:
        process = keeper_process(paths.root)
    if process is not None:
        _end_process(paths, process)
        _tidy(paths, spec)
        return
    if _has_tidied(paths, keeper):
        return
    if end_broken_off(paths.root):
        return
    if not keeper.alive and unfinished_runs(paths.root) and not obstacle(paths.root):
        _end_unfinished(paths, spec)
        keeper = settled_status(paths.root)
    if not keeper.alive:
        if why := not_to_be_tidied(paths.root):
            raise PodError(
                f"nothing was removed for the cluster in {paths.root}, whose keeper died: {why}"
            )
        # A killed keeper could not remove the key. The pods' leases end by themselves.
        Identity(paths.identity).destroy()
        paths.socket.unlink(missing_ok=True)
        _tidy(paths, spec)
        return
    deadline = 0.0
    asked = False
    message = ""
    while keeper.alive:
        asked = asked or _ask_to_close(paths)
        looked = cluster_status(paths.root)
        # Without a pid the state was removed: the process from the earlier look counts.
        if looked.pid is not None:
            keeper = looked
        now = keeper.message
        # The keeper may be copying a checkpoint back, and reports the progress.
        if now != message or not deadline:
            message = now
            deadline = time.monotonic() + _CLOSE_S
        if time.monotonic() > deadline:
            raise PodError(
                f"the keeper (pid {keeper.pid}) does not end: {message}; see {paths.keeper_log}"
            )
        time.sleep(_LOOK_S)
    _tidy(paths, spec)


def _tidy(paths: ClusterPaths, spec: ClusterSpec) -> None:
    """Remove the keeper's leftovers of pods, by the notes in the cluster's own directory."""
    why = why_not_registered(paths.root)
    if why:
        logger.warning("the keeper has ended, and nothing more is removed: %s", why)
        return
    remove_left(spec.backend, paths.root)
    unregister(paths.root)


def _has_tidied(paths: ClusterPaths, keeper: ClusterStatus) -> bool:
    """Whether an earlier call has tidied up, after the keeper or in place of a killed one."""
    if keeper.phase in ("closed", "failed"):
        return registration(paths.root) is None
    return not keeper.alive and is_tidied(paths.root)


def _end_process(paths: ClusterPaths, keeper: Process) -> None:
    """End the keeper of a missing or damaged directory. The keeper stops its pods first."""
    if not _ask_to_close(paths):
        keeper.send(signal.SIGTERM)
    deadline = time.monotonic() + _CLOSE_S
    while keeper.is_alive():
        if time.monotonic() > deadline:
            raise PodError(
                f"the keeper (pid {keeper.pid}) of {paths.root}, "
                "which is gone or damaged, does not end"
            )
        time.sleep(_LOOK_S)


def _ask_to_close(paths: ClusterPaths) -> bool:
    return ask_if_there(paths.socket, {"op": "close"}) is not None
