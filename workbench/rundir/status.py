"""The one answer to: in which state is this run, is its keeper alive, and how does its cluster stand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from workbench.base import entries
from workbench.base.errors import RunError
from workbench.base.files import is_there, load_json, read_json, user_path
from workbench.base.json_values import Json, text
from workbench.base.process import Process, boot_id, is_alive, process_table
from workbench.base.redact import mask_secrets
from workbench.pods.pod import Pod
from workbench.rundir.paths import ClusterPaths, RunPaths
from workbench.rundir.queue import cluster_of
from workbench.rundir.result import result_file
from workbench.rundir.state import RunState
from workbench.rundir.tolerant import Number, TolerantRecord, Whole

_POD = TypeAdapter(Pod)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus(TolerantRecord):
    phase: str = "starting"
    """starting, ready, closing, closed, failed; `lost` where its keeper died before it closed."""
    message: str = ""
    idle_end_s: Number | None = None
    """When it will close, in seconds since the epoch, if nobody uses it before; None where that is not to come."""
    raw_pods: Sequence[Mapping[str, object]] = ()
    raw_arrived: Sequence[Mapping[str, object]] = ()
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
    def pods(self) -> Sequence[Pod]:
        """The pods as the keeper last saw them, in rank order; what is no pod counts as not there."""
        return _pods(self.raw_pods)

    @property
    def arrived(self) -> Sequence[Pod]:
        """The pods that are up while a start waits for the others, and those that say why; none before and after."""
        return _pods(self.raw_arrived)

    @property
    def alive(self) -> bool:
        same_boot = self.boot in ("", boot_id())  # else the machine was started again: its pids are others'
        return self.pid is not None and same_boot and is_alive(self.pid, self.start_time)


def _pods(raw: Sequence[Mapping[str, object]]) -> Sequence[Pod]:
    pods = []
    for each in raw:
        with suppress(ValidationError):
            pods.append(_POD.validate_python(each))
    return pods


def cluster_status(root: Path) -> ClusterStatus:
    raw = read_json(ClusterPaths(root).state)
    status = ClusterStatus.read(
        {**raw, "raw_pods": raw.get("pods"), "raw_arrived": raw.get("arrived"), "last_phase": raw.get("phase")}
    )
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
