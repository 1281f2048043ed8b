"""The one answer to: in which state is this run, where its result is, is its keeper alive, how does its cluster stand.

A cluster's queue lists the runs that its keeper was handed, in order: another keeper goes on with them where one died,
and it says that a cluster knows a run which names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base import entries
from workbench.base.errors import RunError
from workbench.base.files import is_folder, is_there, load_json, read_bytes, read_json, user_path, write_text
from workbench.base.json_values import Json, items, text
from workbench.base.process import Process, boot_id, is_alive, process_table
from workbench.base.redact import mask_secrets
from workbench.pods.pod import Pod
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.state import RunState
from workbench.rundir.tolerant import Number, TolerantRecord, Whole

_POD = TypeAdapter(Pod)


def _read_pods(raw: object) -> list[Pod]:
    """Read pods; what is no pod counts as not there."""
    pods = []
    for each in items(raw):
        with suppress(ValidationError):
            pods.append(_POD.validate_python(each))
    return pods


_Pods = Annotated[Sequence[Pod], BeforeValidator(_read_pods)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus(TolerantRecord):
    phase: str = "starting"
    """starting, ready, closing, closed, failed; `lost` where its keeper died before it closed."""
    message: str = ""
    idle_end_s: Number | None = None
    """When it will close, in seconds since the epoch, if nobody uses it before; None where that is not to come."""
    pods: _Pods = ()
    """The pods as the keeper last saw them, in rank order."""
    arrived: _Pods = ()
    """The pods that are up while a start waits for the others, and those that say why; none before and after."""
    pid: Whole | None = None
    """The keeper's process; None before there is one."""
    start_time: Whole | None = None
    """When that started, in clock ticks since boot; None where the system does not tell."""
    boot: str = ""
    """Which start of its machine that was; empty where the system does not tell."""
    host: str = ""
    lock: Whole | None = None
    """The inode of the file that it holds locked."""
    last_phase: str = ""
    """The phase as the file has it, also where the keeper has died since."""

    @property
    def alive(self) -> bool:
        same_boot = self.boot in ("", boot_id())  # else the machine was started again: its pids are others'
        return self.pid is not None and same_boot and is_alive(self.pid, self.start_time)


def cluster_status(root: Path) -> ClusterStatus:
    raw = read_json(ClusterPaths(root).state)
    status = ClusterStatus.read({**raw, "last_phase": raw.get("phase")})
    over = status.phase in ("closed", "failed") or status.pid is None or status.alive
    return status if over else replace(status, phase="lost")


def keeper_process(root: Path) -> Process | None:
    """Find the keeper of a directory that does not say any more who it is; None where there is none."""
    words = b"\0".join([b"-m", entries.KEEPER.encode(), os.fsencode(root), b""])
    for process in process_table().values():
        with suppress(OSError):
            proc = Path(f"/proc/{process.pid}")
            if proc.stat().st_uid == os.getuid() and words in (proc / "cmdline").read_bytes():
                return process
    return None


def is_keeper(pid: int, root: Path) -> bool:
    """Whether a process is this user's keeper of a directory; where the system shows no command lines, it counts as."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        owner = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return not is_folder(Path("/proc/self"))
    module = os.fsencode(entries.KEEPER)
    started_for = words[words.index(module) + 1] if module in words[:-1] else b""
    same = os.path.realpath(os.fsdecode(started_for)) == os.path.realpath(root)
    return bool(started_for) and same and owner == os.getuid()


def is_keeper_alive(cluster: Path) -> bool:
    return cluster_status(cluster).alive


def run_at(path: str | Path) -> RunPaths:
    """Return the paths of the run in a directory, or raise RunError where there is none."""
    paths = RunPaths(user_path(path).resolve())
    if not is_there(paths.info):
        raise RunError(f"not a run directory: {paths.root} holds no run.json")
    return paths


def id_of(paths: RunPaths) -> str:
    return text(read_json(paths.info).get("id")) or paths.root.name


def state_of(paths: RunPaths, is_alive: Callable[[Path], bool] = is_keeper_alive) -> RunState:
    """Return the state of a run: as its result says, else as its keeper last wrote, and `lost` where that died."""
    if not (file := result_file(paths)).exists():
        if is_alive(cluster_of(paths)):
            return _state_in(paths.state, {"state": RunState.QUEUED, **read_json(paths.state)})
        # The keeper may have written the result between the two looks.
        if not (file := result_file(paths)).exists():
            return RunState.LOST
    return _state_in(file, load_json(file))


def result_file(paths: RunPaths) -> Path:
    """Return where a run's result is, or will be: its own directory, or its cluster's where that could not take it."""
    if not paths.result.exists():
        match read_json(paths.info):
            case {"id": str(run_id), "cluster": str(cluster)} if PurePath(run_id).name == run_id:
                spare = ClusterPaths(Path(cluster)).results / f"{run_id}.json"
                if is_own(spare.parent) and read_json(spare).get("of") == str(paths.root):  # no other run can claim it
                    return spare
    return paths.result


def message_of(paths: RunPaths, state: RunState) -> str:
    """Return one line on the state of a run, for people."""
    if state is RunState.LOST:
        cluster = cluster_status(cluster_of(paths))
        why = f"; {cluster.message}" if cluster.last_phase == "lost" else ""
        return f"its keeper died; what it had written is in {paths.root}{why}"
    raw = read_json(paths.state)
    hint = text(raw.get("hint"))
    return mask_secrets(text(raw.get("message")) + (f" ({hint})" if hint else ""))


def state_or_problem(paths: RunPaths, is_alive: Callable[[Path], bool] = is_keeper_alive) -> tuple[RunState, str]:
    """Return the state of a run, and why it cannot be told: one whose files cannot be read is lost, and no error."""
    try:
        return state_of(paths, is_alive), ""
    except RunError as error:
        return RunState.LOST, str(error)


def _state_in(file: Path, raw: Json) -> RunState:
    try:
        return RunState(text(raw.get("state")))
    except ValueError:
        raise RunError(
            f"{file} does not say in which state the run is; put back a whole copy, or remove {file.parent}"
        ) from None


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


def own_runs(cluster: Path) -> list[QueuedRun]:
    """Read the queue of a cluster without the runs whose own record does not name that cluster.

    Whoever wrote the queue may have named any folder. Only these runs may be written to.
    """
    return [run for run in read_queue(ClusterPaths(cluster).queue) if _is_run_of(run, cluster)]


def _is_run_of(run: QueuedRun, cluster: Path) -> bool:
    """Whether the record in a run's directory names both this run and this cluster, each by a full path."""
    try:
        info = read_json(RunPaths(run.path).info)
        named = Path(text(info.get("cluster")))
        is_full = run.path.is_absolute() and named.is_absolute()  # a relative path is a guess
        return is_full and info.get("id") == run.id and os.path.realpath(named) == os.path.realpath(cluster)
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
