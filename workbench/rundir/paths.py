"""Every path of a cluster's and of a run's directory, on this machine and on the pods; the disk is not touched.

But for a cluster's key and socket, which an earlier version kept elsewhere: it is looked where they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Protocol, TypeVar

from workbench.base.files.private import cluster_folder

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
    """What the cluster was asked to be: backend, pods, count, time-outs."""
    state = _Below("state.json")
    """What the keeper last said of itself and its pods, for readers on any machine; replaced atomically."""
    holder = _Below("holder.json")
    """Who started it: process, user, host and time."""
    lock = _Below(".lock")
    """Held by whoever starts a keeper, until the state names that keeper."""
    keeper_log = _Below("keeper.log")
    hostfile = _Below("hostfile")
    reserve = _Below(".reserve")
    """Room on the disk that is kept for the queue."""
    results = _Below("results")
    """The folder of results that the directories of their runs could not take, by run id."""
    runs = _Below("runs")
    """The folder of run directories that were given no path of their own."""

    @property
    def own_socket(self) -> Path:
        """Where the keeper listens: in a folder of this user's, for pods may share the cluster's."""
        return cluster_folder(self.root) / "keeper.sock"

    @property
    def own_identity(self) -> Path:
        """Where a cluster that starts has its ephemeral key and the pinned host keys, beside the socket."""
        return cluster_folder(self.root) / "identity"

    @property
    def own_state(self) -> Path:
        """The state as this user's keeper wrote it: pods that share the cluster's directory cannot change it."""
        return cluster_folder(self.root) / "state.json"

    @property
    def own_keeper_lock(self) -> Path:
        return cluster_folder(self.root) / "keeper.lock"

    @property
    def own_queue(self) -> Path:
        return cluster_folder(self.root) / "queue.json"

    @property
    def known_state(self) -> Path:
        """The state to believe: the one in this user's own folder, or else the one in the cluster's directory."""
        return (
            self.own_state if os.path.lexists(self.own_state) and self.root.is_dir() else self.state
        )

    @property
    def keeper_lock(self) -> Path:
        """The file that the keeper holds locked for as long as it lives."""
        return self._found(self.own_keeper_lock)

    @property
    def queue(self) -> Path:
        """The runs that the keeper was handed, in order: id and directory. A new keeper continues them."""
        return self._found(self.own_queue)

    @property
    def socket(self) -> Path:
        return self._found(self.own_socket)

    @property
    def identity(self) -> Path:
        """The folder of the ephemeral key and the pinned host keys."""
        return self._found(self.own_identity)

    def _found(self, own: Path) -> Path:
        """Return a path of this user's own, or the one in the cluster's directory where an earlier version put it."""
        earlier = self.root / own.name
        if not self.root.is_dir():  # what is elsewhere is of no use without the directory
            return earlier
        return earlier if os.path.lexists(earlier) and not os.path.lexists(own) else own


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The directory of a run on the notebook's machine: all that anyone needs to watch or judge the run."""

    root: Path

    spec = _Below("spec.json")
    """The SPEC.json that starts this run again."""
    info = _Below("run.json")
    """Fixed facts: run id, cluster directory, time of submission."""
    state = _Below("state.json")
    """The state and a line on it; replaced atomically by the keeper."""
    result = _Below("result.json")
    """The facts of the finished run; its presence means that the run has ended."""
    label = _Below("label.json")
    """The name and the note that people gave the run; absent where nobody did."""
    origin = _Below("origin.json")
    """Where the run came from: commit of the user's repository, fingerprints of data and script."""
    reserve = _Below(".reserve")
    """Room on the disk for the result of a run in progress."""
    events = _Below("events.jsonl")
    """One JSON event a line, in the order the keeper read them."""
    hostfile = _Below("hostfile")
    command = _Below("command.sh")
    inputs = _Below("inputs")
    """What travels to the pods: train.jsonl, eval.jsonl, tables.jsonl, deepspeed.json, script.zip."""
    job = _Below("inputs/job.json")
    """The job with its DeepSpeed JSON and data resolved, as it travels to the pods."""
    script = _Below("inputs/script.zip")
    """A script with its folder, as it was when it was submitted; absent for other jobs."""
    deepspeed = _Below("inputs/deepspeed.json")
    """The DeepSpeed JSON that the ranks are given, to read; absent without DeepSpeed."""
    tables = _Below("inputs/tables.jsonl")
    """The tables that predictions can be executed on, where the dataset has them."""
    logs = _Below("logs")
    """The folder of logs, one file per rank and stream, and the launcher's."""

    def rank_log(self, rank: int, stream: str) -> Path:
        """Return the log of a rank; `stream` is stdout or stderr, or `order`: how far which of them came by turns."""
        return self.logs / f"rank-{rank}.{stream}.log"

    def flight(self, rank: int) -> Path:
        """Return where a rank's last collectives are, of a run that stood still."""
        return self.logs / f"flight-{rank}.json"

    stacks = _Below("logs/stacks.txt")
    """Where every rank was when the run last stood still; absent where it never did."""
    launcher_log = _Below("logs/launcher.log")
    """What pdsh or mpirun and DeepSpeed's runner printed."""
    tensorboard = _Below("tensorboard")
    prediction = _Below("prediction.json")
    """The memory that the run was predicted to need."""
    inquiry = _Below("inquiry.json")
    """What the notebook could not answer of it; gone once it is answered."""
    profile = _Below("profile.txt")
    """The FLOPS profiler's own report."""
    trace = _Below("trace.json.gz")
    """What torch's profiler saw of some steps, in Chrome's format; absent where none was asked for."""
    trace_operators = _Below("trace-operators.json")
    """The costliest operators in it."""
    predictions = _Below("predictions.jsonl")
    """One JSON object a line: source, expected, predicted, exact_match."""
    outputs = _Below("outputs")
    """What a script wrote into its own folder: rank 0's pod's files, and below `pod-1/` those of others."""
    model = _Below("model")
    """The trained model, as `from_pretrained` loads it."""
    checkpoints = _Below("checkpoints")
    """The folder of the last checkpoints that came back: step-N/<pod>/rank-R."""
    arrivals = _Below(".arrivals")
    """Where rank 0 writes what it leaves, when its pod sees this directory; gone at the end of the run."""
    held = _Below("held.json")
    """Where the checkpoints are that stayed on the pods; absent where there are none."""
    manifest = _Below("manifest.json")
    """SHA-256 of every file that came back from the pods; written last."""


def is_left(name: PurePath) -> bool:
    """Whether a run may leave a file of this name, relative to its directory: all else there is the keeper's own.

    Example:
        >>> is_left(PurePath("model/config.json")), is_left(PurePath("spec.json")), is_left(PurePath("files"))
        (True, False, False)
    """
    return name.parts[0] in ("model", "files") if len(name.parts) > 1 else name.name in _LEFT


def is_output(name: str) -> bool:
    """Whether a name is that of a file below `outputs/`, which no pod can have lead anywhere else.

    Example:
        >>> is_output("outputs/final/model.safetensors"), is_output("outputs/../spec.json"), is_output("model/x")
        (True, False, False)
    """
    first, *parts = name.split("/")
    if not name.isprintable():  # half of a surrogate pair stands for a byte that is not UTF-8
        return False
    plain = all(
        part not in ("", ".", "..") and len(os.fsencode(part)) < _LONGEST_NAME for part in parts
    )
    return first == "outputs" and bool(parts) and plain


FLIGHT = "flight.json"
"""In a rank's folder on its pod: its last collectives, from torch's flight recorder, written when it stood still."""
_LONGEST_NAME = 240  # bytes of one part; a file on its way has some more
TRACE, TRACE_OPERATORS = "trace.json.gz", "trace-operators.json"
_LEFT = ("predictions.jsonl", "profile.txt", TRACE, TRACE_OPERATORS)


@dataclass(frozen=True, slots=True)
class PodRunPaths:
    """The directory of a run on one pod, below the pod's root."""

    root: PurePosixPath

    job = _Below("job.json")
    """The job as ranks read it: every option resolved, paths of this pod."""
    request = _Below("request.json")
    """The request to the agent: ranks, environment, what to start."""
    out = _Below("out")
    """What rank 0 leaves to be fetched: model/, predictions.jsonl, profile.txt, and in files/ what a script likes."""
    script = _Below("script")
    """A copy of a script's folder, in which its ranks start."""
    checkpoints = _Below("checkpoints")
    """The checkpoints of this run's ranks on this pod: step-N/rank-R."""
    resume = _Below("resume")
    """The checkpoint that this run goes on from: rank-R for each rank of the pod."""
    stop = _Below("stop")
    """An empty file on rank 0's pod whose presence asks the trainer to stop: within two steps, or under `local-sgd` at
    the next synchronisation."""

    @classmethod
    def of(cls, pod_root: str, run_id: str) -> PodRunPaths:
        return cls(PurePosixPath(pod_root) / "runs" / run_id)

    def rank(self, rank: int) -> PurePosixPath:
        """Return a rank's own folder: stdout.log, stderr.log, error.json, done.json."""
        return self.root / f"rank-{rank}"
