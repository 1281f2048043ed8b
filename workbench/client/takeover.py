"""Start a new keeper for a dead one, if cluster and run belong to this user on this machine.

Files that another user could have written start nothing: neither a copied run directory, nor a run
whose cluster does not list the run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from workbench.base.errors import ConfigError, RunError, WorkbenchError
from workbench.base.files import is_folder, is_there, not_ours, read_json, records, write_json
from workbench.base.files.locks import no_locks_there
from workbench.base.json_values import as_float
from workbench.base.messages.wire import Refused, ask
from workbench.keeper.spawn import TAKEN, spawn_successor
from workbench.pods.backends import remove_left
from workbench.pods.ssh.identity import Identity
from workbench.rundir.checkpoints import Checkpoint, shared_run
from workbench.rundir.make.unstarted import fail_unstarted
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    is_listed,
    own_runs,
    registered,
    unregister,
    was_taken,
    why_not_registered,
)
from workbench.rundir.spec import ClusterSpec, RunSpec
from workbench.rundir.state import RunState
from workbench.rundir.status import (
    UNKNOWN,
    ClusterStatus,
    cluster_status,
    has_result,
    id_of,
    settled_status,
    write_cluster_state,
)

logger = logging.getLogger(__name__)
_START_S = 30.0
_SETTLE_S = 20.0  # from the end of the ranks to the result of a run
_LOOK_S = 0.05
_SETTLED_S = 2.0
_HANDED_S = 40.0  # from a submission until its request has timed out
_TWICE_S = 1.0  # a request in the socket of a suspended keeper is carried out within this time


def take_over(cluster: Path, spec: ClusterSpec | None = None) -> None:
    """Start a keeper for a cluster without a live keeper. RunError: no keeper could start."""
    why = end_broken_off(cluster)
    if why:
        raise RunError(
            f"the cluster in {cluster} is closed: {why}, and "
            "what it left has been removed; start another"
        )
    why = obstacle(cluster)
    if why:
        raise RunError(f"the cluster in {cluster} cannot be taken over: {why}")
    paths = ClusterPaths(cluster)
    keeper = spawn_successor(paths, spec or stored_spec(cluster))
    deadline = time.monotonic() + _START_S
    while not (status := cluster_status(cluster)).alive or status.phase == UNKNOWN:
        ended = keeper.poll() not in (None, TAKEN)  # TAKEN: another keeper is starting
        if ended or time.monotonic() > deadline:
            raise RunError(f"another keeper for {cluster} did not start; see {paths.keeper_log}")
        time.sleep(_LOOK_S)


def reattach(run: RunPaths, *, for_checkpoints: bool = False) -> bool:
    """Take over the cluster of a run if its keeper died; return whether a keeper is alive now.

    With `for_checkpoints`, also after the run's end.
    """
    cluster = cluster_of(run)
    over = has_result(run) and not (for_checkpoints and run.held.exists())
    if over or not is_folder(cluster):
        return False
    try:
        # A keeper that was just killed has its lock until the system has removed the process.
        if settled_status(cluster, _SETTLED_S).alive:
            return True
        why = _foreign((run.root, run.info, run.state))
        if why:
            raise RunError(why)
        own = {os.path.realpath(each.path) for each in own_runs(cluster)}
        if os.path.realpath(run.root) not in own:
            raise RunError(f"{cluster} knows no such run, or the run does not name that cluster")
        take_over(cluster)
    except (WorkbenchError, OSError) as error:
        logger.info("%s stays lost: %s", run.root, error)
        return False
    return True


def settle_handover(run: RunPaths) -> bool:
    """End a run that no keeper ever took, with a result in its directory. Return whether it did.

    A keeper has taken a run once the keeper has written the run's state, or the run is in the
    cluster's queue. Only a live keeper can deny a run. The keeper then refuses a later request for
    the run, since the directory has a result.
    """
    submitted_s = as_float(read_json(run.info).get("submitted_s"))
    if was_taken(run) or submitted_s is None or time.time() < submitted_s + _HANDED_S:
        return False
    if has_result(run):
        return False
    cluster = cluster_of(run)
    # Without a private state, this user never started the cluster: the run is data.
    if not os.path.lexists(ClusterPaths(cluster).own_state):
        return False
    if (
        cluster_status(cluster).phase == "starting"
        or is_listed(run, cluster)
        or _foreign((run.root, run.info))
    ):
        return False
    for pause_s in (_TWICE_S, 0.0):
        try:
            ask(ClusterPaths(cluster).socket, {"op": "outcome", "run": id_of(run)}, timeout_s=5.0)
            return False
        except Refused:
            time.sleep(pause_s)
        except RunError:  # no answer proves nothing
            return False
    try:
        words = (
            "it was never handed over: its notebook ended "
            "before the keeper took it; submit it again"
        )
        fail_unstarted(run, RunSpec.load(run.spec, of_run=True), RunError(words))
    except (WorkbenchError, OSError) as error:
        logger.info("%s: %s", run.root, error)
        return False
    return True


def checkpoint_on_pods(
    cluster: Path, run: RunPaths, last_step: int | None, ranks: int
) -> Checkpoint | None:
    """Return the checkpoint on a run's pods, after a takeover if their keeper died.

    See `held_checkpoint`.
    """
    from workbench.keeper.checkpoints import held_checkpoint  # loads the connections to pods

    if shared_run(run) is not None:
        return held_checkpoint(cluster, run, last_step, ranks)
    home = cluster_of(run)
    ended = has_result(run)
    if not cluster_status(home).alive and reattach(run, for_checkpoints=True):
        deadline = time.monotonic() + stored_spec(home).step_limit_s
        while cluster_status(home).phase == "starting" and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        deadline = time.monotonic() + _SETTLE_S
        while not ended and not has_result(run):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the run in {run.root} continues: its keeper had died, and another has "
                    f"taken over; wait for its end or cancel it: Run.load({str(run.root)!r})"
                )
            time.sleep(_LOOK_S)
    return held_checkpoint(cluster, run, last_step, ranks)


def obstacle(cluster: Path) -> str:
    """Return why no keeper can take over a cluster, or ""."""
    status = cluster_status(cluster)
    if status.alive:
        return "its keeper lives" if status.phase != UNKNOWN else status.message
    if status.last_phase not in ("ready", "lost", "starting", "closing"):
        return f"it is {status.last_phase or 'no cluster of this version'}"
    return _not_ours(cluster, status) or _broken_off(status)


def end_broken_off(cluster: Path) -> str:
    """Remove the leftovers of a keeper that died during the cluster's start or close.

    Return the reason as text, or "" if nothing was removed.
    """
    paths = ClusterPaths(cluster)

    def why() -> str:
        status = settled_status(cluster, _SETTLED_S)
        return "" if status.phase != "lost" or _not_ours(cluster, status) else _broken_off(status)

    if not why():
        return ""
    with records.open_to_append(paths.lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # no other start may use the directory meanwhile
        except OSError as error:
            raise RunError(f"{no_locks_there(paths.lock, error)}; nothing was removed") from error
        if words := why():
            Identity(paths.identity).destroy()
            remove_left(stored_spec(cluster).backend, cluster)
            for run in map(RunPaths, (each.path for each in own_runs(cluster))):
                if not has_result(run) and not _foreign((run.root, run.info, run.state)):
                    for file in (run.result, run.state):
                        write_json(file, {"state": RunState.CANCELLED, "message": words})
                    run.reserve.unlink(missing_ok=True)
            paths.socket.unlink(missing_ok=True)
            write_cluster_state(paths, {"phase": "closed", "message": words})
            unregister(cluster)
    return words or "it was ended at this moment"


def _broken_off(status: ClusterStatus) -> str:
    match status.last_phase:
        case "starting" if not status.pods:
            return "its keeper died before its pods were there"
        case "closing":
            return "its keeper died while it closed the cluster"
    return ""


def _not_ours(cluster: Path, status: ClusterStatus) -> str:
    if status.host != socket.gethostname():
        return (
            f"its keeper ran on {status.host or 'another machine'}; "
            "only there can another take its place"
        )
    return why_not_registered(cluster)


def unfinished_runs(cluster: Path) -> bool:
    """Whether a dead keeper left runs without a result."""
    return any(not has_result(RunPaths(run.path)) for run in own_runs(cluster))


def not_to_be_tidied(cluster: Path) -> str:
    """Return why nothing may be removed for a cluster with a dead keeper, or "" if all may be."""
    status = cluster_status(cluster)
    return "" if status.pid is None or status.alive else _not_ours(cluster, status)


def stored_spec(cluster: Path) -> ClusterSpec:
    """Read the specification of a cluster, with the pods' variables from this environment.

    The stored specification has no values of variables. Raises as `registered`.
    """
    raw = registered(cluster).spec
    match raw.get("pods"):
        case {"env": dict() as env, **rest}:
            here = {name: os.environ[name] for name in map(str, env) if name in os.environ}
            return ClusterSpec.from_dict({**raw, "pods": {**rest, "env": here}})
    return ClusterSpec.from_dict(raw)


def _foreign(paths: Iterable[Path]) -> str:
    for path in paths:
        if path.is_symlink():
            return f"{path} is a symbolic link"
        # The reader of a missing file reports the error.
        why = not_ours(path) if is_there(path) else ""
        if why:
            return why
    return ""
