"""Find the state and result of a run, and the state of its keeper and its cluster."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base import entries
from workbench.base.errors import RunError, Unreadable, check_type
from workbench.base.files import (
    is_missing,
    is_there,
    load_json,
    read_json,
    read_known,
    unreadable,
    user_path,
    write_json,
)
from workbench.base.files.locks import is_locked
from workbench.base.files.records import try_read
from workbench.base.json_values import Json, as_list, as_str
from workbench.base.process import (
    Process,
    activity,
    boot_id,
    is_alive,
    kernel_text,
    process_table,
    status_of,
)
from workbench.base.record.tolerant import Number, TolerantRecord, Whole
from workbench.base.redact import mask_secrets
from workbench.base.words import printable
from workbench.pods.pod import Pod
from workbench.rundir.format import check_format
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.register.registered import (
    cluster_of,
    is_listed,
    is_own,
    known_cluster_of,
    was_taken,
)
from workbench.rundir.register.store import outcome_in, pods_in, registration_in
from workbench.rundir.state import RunState

logger = logging.getLogger(__name__)
UNKNOWN = "unknown"
"""Phase of a cluster that cannot be read at the moment. A later read may succeed."""
_POD = TypeAdapter(Pod)
_SILENCE_S = 20.0
_SETTLE_S = 10.0
_UNATTENDED_S = 120.0  # clocks of machines differ, and file servers keep times for a minute
_LOOK_S = 0.05


def _read_pods(raw: object) -> list[Pod]:
    """Read pods; skip invalid entries."""
    pods = []
    for each in as_list(raw):
        with suppress(ValidationError):
            pods.append(_POD.validate_python(each))
    return pods


_Pods = Annotated[Sequence[Pod], BeforeValidator(_read_pods)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus(TolerantRecord):
    phase: str = "starting"
    """starting, ready, closing, closed, failed, `lost` or `unknown`.

    `lost`: the keeper died before it closed the cluster.
    """
    message: str = ""
    idle_end_s: Number | None = None
    """Time of automatic shutdown, in seconds since the epoch. None: no shutdown is scheduled."""
    pods: _Pods = ()
    """Pods at the keeper's last report, in rank order."""
    arrived: _Pods = ()
    """Pods that started or reported a problem while a start waits for others.

    Empty before and after a start.
    """
    pid: Whole | None = None
    """Process id of the keeper. None: no keeper yet."""
    start_time: Whole | None = None
    """Start time of the keeper's process in clock ticks since boot. None: unknown on the system."""
    boot: str = ""
    """Boot id of the keeper's machine. Empty: unknown on the system."""
    host: str = ""
    last_phase: str = ""
    """Phase in the file, also after the keeper's death."""
    held: bool = False
    """Whether a process held the keeper's lock, though the state names no live process."""
    ready_s: Number | None = None
    """Time since when the pods are or were ready, in seconds since the epoch. None: never."""
    time_s: Number | None = None
    """Time of the keeper's last report, in seconds since the epoch."""
    unread: str = ""
    """Reason why state or lock could not be read. The keeper may then be alive."""

    @property
    def alive(self) -> bool:
        """Whether the cluster has or may have a keeper.

        Nothing may then be started or removed in its place.
        """
        if self.held or self.unread:
            return True
        # After a reboot the pid may belong to another process.
        same_boot = not self.boot or boot_id() in ("", self.boot)
        return self.pid is not None and same_boot and is_alive(self.pid, self.start_time)


def cluster_status(root: Path) -> ClusterStatus:
    """Return the status of a cluster.

    The phase is `lost` only with proof: the process in the state has ended, and the keeper's lock
    is free.
    """
    paths = ClusterPaths(root)
    try:
        raw = read_known(paths.known_state)
        status = ClusterStatus.read(
            {**raw, "last_phase": raw.get("phase"), "held": False, "unread": ""}
        )
        if status.phase in ("closed", "failed") or status.alive:
            return status
        # The state names no live process. Another keeper may have the lock and be about to write.
        # No keeper can write into a directory that is gone.
        held = paths.root.is_dir() and is_locked(paths.keeper_lock)
    except Unreadable as error:
        return ClusterStatus(phase=UNKNOWN, message=str(error), unread=str(error))
    except OSError as error:
        why = str(unreadable(paths.keeper_lock, error))
        return ClusterStatus(phase=UNKNOWN, message=why, unread=why)
    if held:
        words = f"the keeper of the cluster lives and has not written {paths.state} yet"
        return replace(status, phase=UNKNOWN, message=words, held=True)
    if status.pid is not None:
        return replace(status, phase="lost")
    if not raw and (entry := registration_in(paths.store)) is not None and not entry.is_closed:
        # The store says that the cluster was started and never closed.
        pods = _read_pods(pods_in(paths.store))
        before = "ready" if pods else "starting"
        host = socket.gethostname()
        return replace(status, phase="lost", last_phase=before, pods=pods, host=host)
    return status


def write_cluster_state(paths: ClusterPaths, state: Mapping[str, object]) -> None:
    """Write a cluster's state for the user's programs and for readers of its directory.

    Raise OSError on failure.
    """
    if paths.own_state.parent.is_dir():
        write_json(paths.own_state, state)
    write_json(paths.state, state)


def settled_status(root: Path, within_s: float = _SETTLE_S) -> ClusterStatus:
    """Return the status of a cluster; retry for some seconds while the phase is unknown."""
    deadline = time.monotonic() + within_s
    while (status := cluster_status(root)).phase == UNKNOWN and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return status


def silence_of(root: Path, status: ClusterStatus) -> str:
    """Return the time and known reason of a live keeper's silence.

    Empty: no silence, or no live keeper.
    """
    watched = status.phase in ("starting", "ready") and status.host == socket.gethostname()
    if not watched or status.pid is None or not status.alive:
        return ""
    # The keeper touches both of its state files. The private one is on a disk of this machine.
    file = ClusterPaths(root).known_state
    try:
        written_s = file.stat().st_mtime
        writable = not os.statvfs(file).f_flag & os.ST_RDONLY  # otherwise no sign is possible
    except OSError:
        return ""
    if not writable or time.time() - written_s < _SILENCE_S:
        return ""
    stopped = f": process {status.pid} is stopped; kill -CONT {status.pid} continues the keeper"
    since = time.strftime("%H:%M:%S", time.localtime(written_s))
    return f"the keeper does not answer since {since}{stopped if activity(status.pid)[1] else ''}"


def keeper_process(root: Path) -> Process | None:
    """Find the keeper's process of a directory whose state does not name the keeper.

    None: no keeper.
    """
    words = "\0".join(["-m", entries.KEEPER, str(root), ""])
    for process in process_table().values():
        # Another user may run a process with the same words.
        own = status_of(process.pid).get("Uid", "").split()[:1] == [str(os.getuid())]
        if own and words in kernel_text(f"/proc/{process.pid}/cmdline"):
            return process
    return None


def is_keeper_alive(cluster: Path) -> bool:
    """Whether a cluster's keeper is alive. Raise Unreadable if the state is unknown."""
    status = cluster_status(cluster)
    if status.unread:
        raise Unreadable(status.unread)
    return status.alive


def run_at(path: str | Path) -> RunPaths:
    """Return the paths of the run in a directory. Raise RunError if the directory holds no run."""
    check_type("a run", path, (str, PathLike), "the path of the run's directory")
    paths = RunPaths(user_path(path).resolve())
    if not is_there(paths.info):
        raise RunError(f"not a run directory: {paths.root} holds no run.json")
    check_format(read_json(paths.info), str(paths.root))
    return paths


def id_of(paths: RunPaths) -> str:
    return as_str(read_json(paths.info).get("id")) or paths.root.name


def state_of(paths: RunPaths, keepers: dict[Path, bool] | None = None) -> RunState:
    """Return the state of a run: from its result, or else from the keeper's last report.

    The state is `lost` if the keeper died, and `unknown` if files cannot be read at the moment.
    `keepers` keeps whether the keeper of a cluster is alive, for a look at many runs.
    """
    try:
        return _state_of(paths, keepers)
    except Unreadable:
        return RunState.UNKNOWN


def _state_of(paths: RunPaths, keepers: dict[Path, bool] | None) -> RunState:
    result = _result_of(paths)
    if not result:
        cluster = known_cluster_of(paths)
        keepers = {} if keepers is None else keepers
        if cluster not in keepers:
            keepers[cluster] = is_keeper_alive(cluster)
        if keepers[cluster] or _has_sign_of_life(paths):
            return _state_in(paths.state, {"state": RunState.QUEUED, **read_known(paths.state)})
        # The keeper may have written the result in the meantime.
        result = _result_of(paths) or _decided(paths, cluster)
        if not result:
            return RunState.LOST
    return _state_in(_result_file(paths), result)


def _is_unattended(paths: RunPaths) -> bool:
    return "unattended" in read_known(paths.info)


def no_keeper(paths: RunPaths) -> str:
    """Return the words on a run that no keeper follows; empty for a run of a cluster.

    Also empty if the files cannot be read at the moment.
    """
    info = read_json(paths.info)
    if "unattended" not in info:
        return ""
    job = as_str(info.get("job"))
    how = f"End its Slurm job with: scancel {job}" if job.isdecimal() else "End the job itself"
    return f"run {id_of(paths)} has no keeper: a job runs its ranks. {how}"


def _has_sign_of_life(paths: RunPaths) -> bool:
    """Whether rank 0 of a run without a keeper has renewed the state lately."""
    with suppress(FileNotFoundError):
        return _is_unattended(paths) and time.time() - paths.state.stat().st_mtime < _UNATTENDED_S
    return False


def _decided(paths: RunPaths, cluster: Path) -> Json:
    """Return the end of a run by the store of its cluster. Empty: no end is known."""
    return outcome_in(ClusterPaths(cluster).store, id_of(paths))


def _result_of(paths: RunPaths) -> Json:
    """Return a run's result. Empty: the file is missing, or a power cut left it empty or torn."""
    file = _result_file(paths)
    try:
        return load_json(file)
    except Unreadable:
        raise
    except RunError:
        if is_missing(file) or _is_torn(file):
            return {}
        raise


def _is_torn(file: Path) -> bool:
    """Whether a file that is no JSON object begins as a record, has zeros or has nothing."""
    content = try_read(file)  # None: a link or a pipe is no record of the keeper.
    return content is not None and content[:1] in (b"", b"{", b"\0")


def _torn_words(paths: RunPaths) -> str:
    """Return the reason why a run without another record of its end is lost; usually empty."""
    file = result_file(paths)
    if is_missing(file) or has_result(paths):
        return ""
    return f"{file} is empty or torn, and nothing else says how the run ended"


def has_result(paths: RunPaths) -> bool:
    """Whether a run has a result. An empty or torn file counts as missing."""
    try:
        return bool(_result_of(paths))
    except Unreadable:
        return False
    except RunError:  # Another program put the file there.
        return True


def result_file(paths: RunPaths) -> Path:
    """Return the path of a run's result.

    The file is in the run directory, or in its cluster's if the directory could not take the file.
    """
    try:
        return _result_file(paths)
    except Unreadable:
        return paths.result


def _result_file(paths: RunPaths) -> Path:
    if is_missing(paths.result):
        match read_known(paths.info):
            case {"id": str(run_id), "cluster": str(cluster)} if PurePath(run_id).name == run_id:
                spare = ClusterPaths(Path(cluster)).results / f"{run_id}.json"
                # The result names its run, so no other run can claim the file.
                if is_own(spare.parent) and read_known(spare).get("of") == str(paths.root):
                    return spare
    return paths.result


def message_of(paths: RunPaths, state: RunState) -> str:
    """Return a message on the state of a run in a line."""
    if state is RunState.UNKNOWN:
        return unknown_words(paths)
    cluster = cluster_status(cluster_of(paths))
    if state is RunState.LOST:
        torn = _torn_words(paths)
        if torn:
            return printable(torn)
        if _is_unattended(paths):
            return (
                f"its ranks ended without a result; the log of the job has the reason, and a new"
                f" start continues from the last checkpoint in {printable(str(paths.root))}"
            )
        if not (was_taken(paths) or is_listed(paths, cluster_of(paths))):
            return (
                "it was never handed over: its notebook or the keeper "
                "ended before the keeper took it; submit it again"
            )
        why = f"; {cluster.message}" if cluster.last_phase == "lost" else ""
        return printable(f"its keeper died; the files of the run are in {paths.root}{why}")
    raw = read_json(paths.state)
    if state.is_terminal:  # the result is written first
        result = read_json(result_file(paths)) or _decided(paths, cluster_of(paths))
        raw = {**raw, **result}
    silence = "" if state.is_terminal else silence_of(cluster_of(paths), cluster)
    hints = "; ".join(filter(None, [as_str(raw.get("hint")), silence]))
    return mask_secrets(printable(as_str(raw.get("message")) + (f" ({hints})" if hints else "")))


def unknown_words(paths: RunPaths) -> str:
    """Return the reason for a run's unknown state, in words."""
    _, problem = state_or_problem(paths)
    passed = "the state of the run could not be read a moment ago; the next look tries again"
    return problem or passed


def state_or_problem(
    paths: RunPaths, keepers: dict[Path, bool] | None = None
) -> tuple[RunState, str]:
    """Return the state of a run and the problem in reading the state.

    A run with damaged files is lost, and no error is raised.
    """
    try:
        state = _state_of(paths, keepers)
        return state, _torn_words(paths) if state is RunState.LOST else ""
    except Unreadable as error:
        return (
            RunState.UNKNOWN,
            f"{error}; the run may well continue, and the next look tries again",
        )
    except RunError as error:
        return RunState.LOST, str(error)


def _state_in(file: Path, raw: Json) -> RunState:
    try:
        return RunState(as_str(raw.get("state")))
    except ValueError:
        raise RunError(
            f"{file} has no valid state of the run; put back a whole copy, or remove {file.parent}"
        ) from None
