"""Define the paths of cluster and run directories, on the local machine and on pods.

The disk is not read, except for the question which of two state files is trusted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol, TypeVar

from workbench.base.files.private import cluster_folder
from workbench.base.process import rank_log

STORE = "store.db"
"""Name of a cluster's store in its private folder."""
LOCK = "keeper.lock"
"""Name of the keeper's lock in the private folder."""
P = TypeVar("P", bound=PurePath)
P_co = TypeVar("P_co", bound=PurePath, covariant=True)


class _Rooted(Protocol[P_co]):
    @property
    def root(self) -> P_co: ...


class _Below:
    def __init__(self, name: str):
        self._name = name

    def __get__(self, paths: _Rooted[P], _class: object = None) -> P:
        return paths.root / self._name


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    root: Path

    config = _Below("cluster.json")
    """Copy of the spec for readers: backend, pods, count, time-outs. `started`: process, user,
    host, time and notebook of the start."""
    state = _Below("state.json")
    """Last state of the keeper and its pods, for readers on any machine; replaced atomically."""
    lock = _Below(".lock")
    """Lock of the process that starts a keeper, until the state names the keeper."""
    keeper_log = _Below("keeper.log")
    hostfile = _Below("hostfile")
    results = _Below("results")
    """Folder of results that could not be written into their run directories, by run id."""
    runs = _Below("runs")
    """Folder of run directories without a path of their own."""
    measured = _Below(".measured")
    """Folder of the short runs of a plan. Lists of runs skip hidden folders."""

    @property
    def socket(self) -> Path:
        """Socket of the keeper in a private folder of the user.

        Pods may share the cluster's directory.
        """
        return cluster_folder(self.root) / "keeper.sock"

    @property
    def identity(self) -> Path:
        """Folder of the ephemeral key and the pinned host keys, beside the socket."""
        return cluster_folder(self.root) / "identity"

    @property
    def own_state(self) -> Path:
        """State file in the user's private folder.

        Pods with the cluster's directory cannot change the file.
        """
        return cluster_folder(self.root) / "state.json"

    @property
    def keeper_lock(self) -> Path:
        """Lock file of the keeper, locked during the keeper's life."""
        return cluster_folder(self.root) / LOCK

    @property
    def store(self) -> Path:
        """SQLite file that only the user's own processes write: see `rundir/register/store.py`."""
        return cluster_folder(self.root) / STORE

    @property
    def known_state(self) -> Path:
        """Trusted state file: in the user's private folder, or else in the cluster's directory."""
        return self.own_state if self._is_known and self.root.is_dir() else self.state

    @property
    def _is_known(self) -> bool:
        """Whether the private folder has the cluster.

        Files in the cluster's directory are then ones that a pod or another person put there.
        """
        return os.path.lexists(self.own_state) or os.path.lexists(self.store)


@dataclass(frozen=True, slots=True)
class RunPaths:
    """Paths of a run directory on the notebook's machine.

    The directory suffices to watch a run and to judge its end.
    """

    root: Path

    spec = _Below("spec.json")
    """SPEC.json to start the run again."""
    info = _Below("run.json")
    """Fixed facts: run id, cluster directory, time of submission."""
    state = _Below("state.json")
    """State and message of the run; replaced atomically by the keeper."""
    result = _Below("result.json")
    """Facts of the finished run. The file exists only after the end of the run."""
    label = _Below("label.json")
    """Name, note and tags of the run. Absent: not set."""
    origin = _Below("origin.json")
    """Origin of the run: commit of the user's repository, fingerprints of data and script."""
    reserve = _Below(".reserve")
    """Reserved room on the disk for the result of a run in progress."""
    events = _Below("events.jsonl")
    """JSON events, an event per line, in the order of reading by the keeper."""
    thinned = _Below("thinned.jsonl")
    """Events that totals and plots of the whole run need: see `rundir/thinned.py`. Absent: the run
    has few events."""
    samples = _Below("samples.jsonl")
    """Memory of the pods over time, of bounded size: see `rundir/figures/samples.py`. Absent: no
    sample so far."""
    hostfile = _Below("hostfile")
    command = _Below("command.sh")
    inputs = _Below("inputs")
    """Folder of files for the pods.

    Files: train.jsonl, eval.jsonl, tables.jsonl, deepspeed.json, script.zip.
    """
    job = _Below("inputs/job.json")
    """Job for the pods, with DeepSpeed JSON and data resolved."""
    requirements = _Below("inputs/requirements.json")
    """Packages of the ranks' environment. Absent: the pods' own packages."""
    script = _Below("inputs/script.zip")
    """Zip of the script's folder at submission. Absent for other jobs."""
    deepspeed = _Below("inputs/deepspeed.json")
    """DeepSpeed JSON of the ranks, for the reader. Absent without DeepSpeed."""
    tables = _Below("inputs/tables.jsonl")
    """Tables to execute predictions on. Absent if the dataset has none."""
    logs = _Below("logs")
    """Folder of logs: a folder per attempt with a file per rank and stream, and further logs."""

    def rank_log(self, attempt: int, rank: int, stream: str) -> Path:
        """Return the log of a rank, in the folder of an attempt: the number of restarts before.

        `stream` is stdout, stderr or `order`, the record of the alternation of both.
        """
        return self.logs / rank_log(attempt, rank, stream)

    def packages_log(self, pod: str) -> Path:
        """Return the output of pip on a pod that installed packages for the run."""
        return self.logs / f"packages.{pod}.log"

    def flight(self, rank: int) -> Path:
        """Return the file of a rank's last collectives, for a run that stalled."""
        return self.logs / f"flight-{rank}.json"

    stacks = _Below("logs/stacks.txt")
    """Stacks of all ranks at the last stall. Absent: the run never stalled."""
    launcher_log = _Below("logs/launcher.log")
    """Output of pdsh or mpirun and of DeepSpeed's runner."""
    tensorboard = _Below("tensorboard")
    profile = _Below("profile.txt")
    """Report of the FLOPS profiler."""
    trace = _Below("trace.json.gz")
    """Trace of torch's profiler over some steps, in Chrome's format. Absent: no trace requested."""
    trace_operators = _Below("trace-operators.json")
    """Costliest operators in the trace."""
    benchmarks = _Below("benchmarks.json")
    """Figures of lm-eval on the run's model. Absent: no evaluation with `run.evaluate`."""
    predictions = _Below("predictions.jsonl")
    """A JSON object per line: source, expected, predicted, exact_match."""
    outputs = _Below("outputs")
    """Files of a script: from rank 0's pod directly, from other pods below `pod-1/` and so on."""
    model = _Below("model")
    """Trained model in the format of `from_pretrained`."""
    checkpoints = _Below("checkpoints")
    """Folder of the last copied checkpoints: step-N/<pod>/rank-R."""
    resumed = _Below("resumed")
    """Folder of the job and the checkpoint that were fetched from an object store to resume."""
    held = _Below("held.json")
    """Places of the checkpoints on pods. Absent: no checkpoint stayed on a pod."""
    manifest = _Below("manifest.json")
    """SHA-256 of every file copied from the pods; written last."""


def is_output_name(name: PurePath) -> bool:
    """Whether a run may leave a file of the name.

    All other files in the directory are the keeper's.

    Example:
        >>> is_output_name(PurePath("model/config.json"))
        True
        >>> is_output_name(PurePath("spec.json")), is_output_name(PurePath("files"))
        (False, False)
    """
    if len(name.parts) > 1:
        return name.parts[0] in ("model", "files") and _is_safe(name.parts)
    return name.name in _OUTPUT_NAMES


def is_output(name: str) -> bool:
    """Whether a name is a safe path of a file below `outputs/`, with no way out for a pod's file.

    Example:
        >>> is_output("outputs/final/model.safetensors")
        True
        >>> is_output("outputs/../spec.json"), is_output("model/x")
        (False, False)
    """
    first, *parts = name.split("/")
    return first == "outputs" and bool(parts) and _is_safe(parts)


def _is_safe(parts: Sequence[str]) -> bool:
    """Whether the parts of a pod's path make a path here, and no way out."""
    # A lone surrogate is not printable. It stands for a byte that is not UTF-8.
    if not all(part.isprintable() and part not in ("", ".", "..") for part in parts):
        return False
    sizes = [len(os.fsencode(part)) for part in parts]
    is_short = max(sizes, default=0) < _LONGEST_NAME and sum(sizes) < _LONGEST_PATH
    return is_short and len(sizes) <= _DEEPEST


FLIGHT = "flight.json"
"""Name of the file of a rank's last collectives, in the rank's folder on its pod.

The data are from torch's flight recorder, written at a stall.
"""
_LONGEST_NAME = 240  # bytes of a path's part; a file in transfer has a longer name
_LONGEST_PATH = 2000  # bytes of a path; the system takes 4096 with the run directory
_DEEPEST = 100  # folders; each is an open descriptor while a file below is written
TRACE = "trace.json.gz"
TRACE_OPERATORS = "trace-operators.json"
_OUTPUT_NAMES = ("predictions.jsonl", "profile.txt", TRACE, TRACE_OPERATORS)


@dataclass(frozen=True, slots=True)
class PodRunPaths:
    """Paths of a run directory on a pod, below the pod's root."""

    root: PurePosixPath

    job = _Below("job.json")
    """Job for the ranks: every option resolved, with the pod's paths."""
    request = _Below("request.json")
    """Request to the agent: ranks, environment, program."""
    out = _Below("out")
    """Results of rank 0 for the keeper.

    Content: model/, predictions.jsonl, profile.txt, and a script's own files in files/.
    """
    script = _Below("script")
    """Folder with the copy of the script's folder; ranks start in the copy."""
    checkpoints = _Below("checkpoints")
    """Checkpoints of the run's ranks on the pod: step-N/rank-R."""
    resume = _Below("resume")
    """Checkpoint to continue from: rank-R for every rank of the pod."""
    stop = _Below("stop")
    """Empty file on rank 0's pod; its presence asks the trainer to stop.

    The trainer stops within two steps, or under `local-sgd` at the next synchronisation.
    """

    @classmethod
    def of(cls, pod_root: str, run_id: str) -> PodRunPaths:
        return cls(PurePosixPath(pod_root) / "runs" / run_id)

    def rank(self, rank: int) -> PurePosixPath:
        """Return the folder of a rank, with error.json and done.json."""
        return self.root / f"rank-{rank}"

    def rank_log(self, attempt: int, rank: int, stream: str) -> PurePosixPath:
        """Return the log of a rank, as `RunPaths.rank_log` does."""
        return self.root / rank_log(attempt, rank, stream)
