"""`Cluster`: the user's first object. Pods, their keeper and the runs on them, tied together.

The object is a window: the keeper, a process of its own, owns pods and runs, so the notebook's kernel can end at any
moment. Checking a job and preparing its data happen here, before anything starts.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from workbench.errors import BackendError, ConfigError, PodError, RunError, WorkbenchError
from workbench.pods.hostfile import Hostfile
from workbench.pods.pod import Pod, PodBackend, PodSpec
from workbench.runs.paths import ClusterPaths, RunPaths
from workbench.runs.run import Run
from workbench.runs.specfile import ClusterSpec, RunSpec
from workbench.runs.state import is_alive, process_start_time, read_json, write_json
from workbench.runs.wire import ask
from workbench.spec.dataset import dataset_from, prepare
from workbench.spec.dsconfig import resolve
from workbench.spec.job import FineTune, Job, Script
from workbench.spec.technique import Technique

__all__ = ["Cluster", "prepare_run"]

_CLOSE_S = 40.0
_LOOK_S = 0.05


class Cluster:
    """The pods of one experiment.

    Use it as a context, or call `start` and `close`. Leaving the context ends a run that is still going and stops
    the pods; a kernel that dies leaves them to the keeper, which lets the run finish and stops the pods when idle.

    Example:
        with Cluster(LocalPods(), PodSpec(cpus=1), count=3) as cluster:
            result = cluster.submit(FineTune(technique="zero1", max_steps=50)).wait()
    """

    def __init__(
        self,
        backend: PodBackend,
        spec: PodSpec | None = None,
        *,
        count: int = 1,
        idle_timeout_s: float | None = 600.0,
        path: str | Path | None = None,
        lease_s: float = 120.0,
        start_timeout_s: float = 120.0,
    ):
        """Describe a cluster; nothing starts yet.

        Args:
            backend: Where the pods come from.
            spec: What each pod needs. Default: one core.
            count: Number of pods.
            idle_timeout_s: Seconds without a run or a word from a notebook after which the pods stop; None: never.
            path: The cluster's directory, new or empty. Default: `runs/cluster-<time>-<id>` in the current folder.
            lease_s: Seconds that ranks outlive a keeper that fell silent.
            start_timeout_s: Seconds until pods that have not come are given up.

        Raises:
            ConfigError: A value that cannot be.
        """
        self._spec = ClusterSpec(
            backend=backend.to_dict(),
            pods=spec or PodSpec(),
            count=count,
            idle_timeout_s=idle_timeout_s,
            lease_s=lease_s,
            start_timeout_s=start_timeout_s,
        )
        name = f"cluster-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._paths = ClusterPaths(Path(path or Path("runs") / name).expanduser().absolute())

    @classmethod
    def from_spec(cls, spec: ClusterSpec, path: str | Path | None = None) -> Cluster:
        """Make the cluster that a `SPEC.json` asks for; nothing starts yet.

        Raises:
            ConfigError: The backend is unknown or refuses its options.
        """
        from workbench.pods.registry import backend_from_dict

        cluster = cls(backend_from_dict(spec.backend), spec.pods, count=spec.count, path=path)
        cluster._spec = spec
        return cluster

    @property
    def path(self) -> Path:
        """The cluster's directory."""
        return self._paths.root

    def start(self) -> Cluster:
        """Start the keeper and wait until every pod can be reached.

        Returns:
            This cluster.

        Raises:
            ConfigError: The directory holds another cluster, or the place cannot give what the spec asks.
            BackendError: The platform refused.
            PodError: A pod died on the way or did not come in time; `PodTimeout` for the latter.
        """
        _fresh_folder(self._paths.root, self._paths.config)
        self.path.chmod(0o700)
        write_json(self._paths.config, {**self._spec.to_dict(), "pods": _without_env(self._spec.pods)})
        keeper = _spawn_keeper(self._paths, self._spec)
        deadline = time.monotonic() + self._spec.start_timeout_s + 30
        try:
            self._wait(lambda: self.phase != "starting", deadline, keeper)
        except BaseException:
            self.close()  # an interrupted start must not leave pods behind
            raise
        if self.phase != "ready":
            raise _start_error(self.message, self._paths.keeper_log)
        return self

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def phase(self) -> str:
        """Where the cluster is in its life: starting, ready, closing, closed, failed; `lost` if its keeper died."""
        state = read_json(self._paths.state)
        phase = str(state.get("phase", "starting"))
        pid, start_time = state.get("pid"), state.get("start_time")
        if phase in ("closed", "failed") or not isinstance(pid, int):
            return phase
        return phase if is_alive(pid, start_time if isinstance(start_time, int) else None) else "lost"

    @property
    def message(self) -> str:
        """One line on the phase, for people."""
        return str(read_json(self._paths.state).get("message", ""))

    @property
    def pods(self) -> Sequence[Pod]:
        """The pods as the keeper last saw them, in rank order."""
        pods = read_json(self._paths.state).get("pods", [])
        return [Pod.from_dict(pod) for pod in pods] if isinstance(pods, list) else []

    @property
    def hostfile(self) -> Hostfile:
        """The hostfile of all pods; prints as the file.

        Raises:
            RunError: The cluster has not started.
        """
        if not self._paths.hostfile.exists():
            raise RunError(f"the cluster is {self.phase}; its hostfile is there once the pods are ready")
        return Hostfile.parse(self._paths.hostfile.read_text(encoding="utf-8"), source=str(self._paths.hostfile))

    @property
    def runs(self) -> list[Run]:
        """The runs in the cluster's own directory, oldest first."""
        found = self._paths.runs.glob("*/run.json")
        return [Run.load(path.parent) for path in sorted(found, key=lambda p: p.stat().st_mtime)]

    def submit(self, job: Job, *, pods: int | None = None, path: str | Path | None = None) -> Run:
        """Check a job, prepare its data, and hand it to the keeper. Returns before the run starts.

        Runs of one cluster go one after another.

        Args:
            job: What to run.
            pods: How many of the pods it takes, the first ones. Default: all; one for technique `single`.
            path: The run directory, new or empty. Default: a new folder below the cluster's `runs`.

        Raises:
            ConfigError: The job, its data or its DeepSpeed JSON is refused; nothing has started.
            RunError: The cluster is not ready.
        """
        if self.phase != "ready":
            raise RunError(f"the cluster is {self.phase}: {self.message or 'call start() first'}")
        if pods is not None and not 1 <= pods <= self._spec.count:
            raise ConfigError(f"pods is {pods}; this cluster has {self._spec.count}")
        run_id, paths = self._run_folder(job, path)
        job = _with_absolute_paths(job)
        prepare_run(RunSpec(cluster=self._spec, job=job, pods=pods), paths, run_id, self._paths.root)
        request = {"op": "submit", "run": run_id, "path": str(paths.root), "job": job.to_dict(), "pods": pods}
        ask(self._paths.socket, request)
        return Run.load(paths.root)

    def close(self) -> None:
        """Stop the run in progress and all pods, and remove the key; returns when nothing is left. Idempotent.

        Raises:
            PodError: Something is still there after 40 s.
        """
        state = read_json(self._paths.state)
        pid, start_time = state.get("pid"), state.get("start_time")
        if not isinstance(pid, int) or not isinstance(start_time, int | None) or not is_alive(pid, start_time):
            return
        try:
            ask(self._paths.socket, {"op": "close"})
        except RunError:
            if not is_alive(pid, start_time):
                return
        deadline = time.monotonic() + _CLOSE_S
        while is_alive(pid, start_time):
            if time.monotonic() > deadline:
                raise PodError(
                    f"the keeper (pid {pid}) has not ended in {_CLOSE_S:.0f} s; see {self._paths.keeper_log}"
                )
            time.sleep(_LOOK_S)

    def _run_folder(self, job: Job, path: str | Path | None) -> tuple[str, RunPaths]:
        what = job.technique if isinstance(job, FineTune) else Path(job.path).stem
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{secrets.token_hex(2)}"
        return run_id, RunPaths(Path(path).expanduser().absolute() if path else self._paths.runs / run_id)

    def _wait(self, ready: Callable[[], bool], deadline: float, keeper: subprocess.Popen[bytes]) -> None:
        while not ready():
            if keeper.poll() is not None and not ready():
                raise PodError(f"the keeper ended with {keeper.returncode}; see {self._paths.keeper_log}")
            if time.monotonic() > deadline:
                raise PodError(f"the cluster is still starting: {self.message}; see {self._paths.keeper_log}")
            time.sleep(_LOOK_S)

    def __repr__(self) -> str:
        """Say the phase, the pods and the directory."""
        return f"Cluster({self.phase}, {self._spec.count} {self._spec.backend.get('kind')} pods, {self.path})"

    def __str__(self) -> str:
        """Give the pods as a text table."""
        from workbench.display.cluster import cluster_text

        return cluster_text(self.phase, self.message, self.pods)

    def _repr_html_(self) -> str:
        from workbench.display.cluster import cluster_html

        return cluster_html(self.phase, self.message, self.pods)


def prepare_run(spec: RunSpec, paths: RunPaths, run_id: str, cluster: Path) -> None:
    """Make a run directory: check the job against its files, prepare the data, write down what was asked.

    Args:
        spec: What was asked.
        paths: The run directory, new or empty.
        run_id: Id of the run.
        cluster: The cluster's directory.

    Raises:
        ConfigError: Something is refused; the message names the file, line or key. A directory that was made for
            this run is removed again.
    """
    with _Fresh(paths.root, paths.info):
        paths.inputs.mkdir()
        if isinstance(spec.job, FineTune):
            _prepare_finetune(spec.job, paths, spec.cluster.pods.gpus)
        elif not Path(spec.job.path).is_file():
            raise ConfigError(f"the script {spec.job.path} does not exist")
        write_json(paths.spec, spec.to_dict())
        write_json(paths.state, {"state": "queued", "message": "waiting for the keeper", "time_s": time.time()})
        write_json(paths.info, {"id": run_id, "cluster": str(cluster), "submitted_s": time.time()})


def _prepare_finetune(job: FineTune, paths: RunPaths, gpus: int) -> None:
    _check_model(job.model)
    deepspeed = resolve(job, gpus=gpus)
    data = prepare(dataset_from(job.dataset), paths.inputs)
    resolved: Mapping[str, object] = {
        "job": {**job.to_dict(), "env": {}},
        "train": data.train.name if data.train else None,
        "eval": data.eval.name if data.eval else None,
        "hub": data.hub,
        "deepspeed": deepspeed,
    }
    (paths.inputs / "job.json").write_text(json.dumps(resolved, indent=1), encoding="utf-8")


def _check_model(model: str) -> None:
    """Refuse a model that looks like a folder and is none; whether a hub id exists only the hub can tell."""
    folder = Path(model).expanduser()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"the model folder {model} holds no config.json; give a folder that `save_pretrained` wrote")
    if looks_local and not folder.is_dir():
        raise ConfigError(f"the model folder {model} does not exist; allowed are a folder, a hub id, or 'tiny-t5'")


def _with_absolute_paths(job: Job) -> Job:
    if isinstance(job, Script):
        return replace(job, path=str(Path(job.path).expanduser().absolute()))
    folder = Path(job.model).expanduser()
    return replace(job, model=str(folder.absolute())) if folder.is_dir() else job


@dataclass
class _Fresh:
    """Make a folder that must be new or empty, and remove it again if the block fails."""

    root: Path
    mark: Path

    def __enter__(self) -> None:
        _fresh_folder(self.root, self.mark)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            import shutil

            shutil.rmtree(self.root, ignore_errors=True)


def _fresh_folder(root: Path, mark: Path) -> None:
    if mark.exists():
        raise ConfigError(f"{root} already holds a run or cluster ({mark.name}); choose another directory")
    if root.is_dir() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty; choose a new directory")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the directory {root}: {error.strerror}") from error


def _without_env(pods: PodSpec) -> dict[str, object]:
    return {**pods.to_dict(), "env": dict.fromkeys(pods.env, "…")}


def _spawn_keeper(paths: ClusterPaths, spec: ClusterSpec) -> subprocess.Popen[bytes]:
    """Start the keeper in a session of its own, so that no signal meant for the notebook reaches it."""
    write_json(paths.state, {"phase": "starting", "message": "starting the keeper"})
    with paths.keeper_log.open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "workbench.runs.keeper", str(paths.root)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PYTHONPATH": _own_import_path()},
            start_new_session=True,
        )
    write_json(
        paths.state,
        {
            "phase": "starting",
            "message": "starting the keeper",
            "pid": keeper.pid,
            "start_time": process_start_time(keeper.pid),
        },
    )
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(spec.to_dict()).encode())
    keeper.stdin.close()
    return keeper


def _own_import_path() -> str:
    """Give the import path under which the keeper finds the very package that this process runs."""
    here = str(Path(__file__).resolve().parent.parent)
    rest = os.environ.get("PYTHONPATH", "")
    return f"{here}{os.pathsep}{rest}" if rest else here


def _start_error(message: str, log: Path) -> WorkbenchError:
    kinds = {"BackendError": BackendError}
    del kinds
    return PodError(f"{message}\nThe keeper's log is {log}")
