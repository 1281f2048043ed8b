"""Every path of a cluster's and of a run's directory, on this machine and on the pods.

Nothing here touches the disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["ClusterPaths", "PodRunPaths", "RunPaths"]


@dataclass(frozen=True, slots=True)
class ClusterPaths:
    """The directory of a cluster on the notebook's machine."""

    root: Path

    @property
    def config(self) -> Path:
        """What the cluster was asked to be: backend, pods, count, time-outs."""
        return self.root / "cluster.json"

    @property
    def state(self) -> Path:
        """What the keeper last said of itself and its pods; replaced atomically."""
        return self.root / "state.json"

    @property
    def keeper_log(self) -> Path:
        """The keeper's own log."""
        return self.root / "keeper.log"

    @property
    def socket(self) -> Path:
        """The keeper's Unix socket."""
        return self.root / "keeper.sock"

    @property
    def identity(self) -> Path:
        """The folder of the ephemeral key and the pinned host keys."""
        return self.root / "identity"

    @property
    def hostfile(self) -> Path:
        """The hostfile of all pods."""
        return self.root / "hostfile"

    @property
    def runs(self) -> Path:
        """The folder of run directories that were given no path of their own."""
        return self.root / "runs"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The directory of a run on the notebook's machine: all that anyone needs to watch or judge the run."""

    root: Path

    @property
    def spec(self) -> Path:
        """The SPEC.json that starts this run again."""
        return self.root / "spec.json"

    @property
    def info(self) -> Path:
        """Fixed facts: run id, cluster directory, time of submission."""
        return self.root / "run.json"

    @property
    def state(self) -> Path:
        """The state and a line on it; replaced atomically by the keeper."""
        return self.root / "state.json"

    @property
    def result(self) -> Path:
        """The facts of the finished run; its presence means that the run has ended."""
        return self.root / "result.json"

    @property
    def origin(self) -> Path:
        """Where the run came from: commit of the user's repository, fingerprints of data and script."""
        return self.root / "origin.json"

    @property
    def reserve(self) -> Path:
        """Room on the disk for the result of a run in progress."""
        return self.root / ".reserve"

    @property
    def events(self) -> Path:
        """One JSON event a line, in the order the keeper read them."""
        return self.root / "events.jsonl"

    @property
    def hostfile(self) -> Path:
        """The hostfile of the pods of this run."""
        return self.root / "hostfile"

    @property
    def command(self) -> Path:
        """The launch command as a shell line."""
        return self.root / "command.sh"

    @property
    def inputs(self) -> Path:
        """What travels to the pods: train.jsonl, eval.jsonl, tables.jsonl, deepspeed.json, script/."""
        return self.root / "inputs"

    @property
    def job(self) -> Path:
        """The job with its DeepSpeed JSON and data resolved, as it travels to the pods."""
        return self.inputs / "job.json"

    @property
    def deepspeed(self) -> Path:
        """The DeepSpeed JSON that the ranks are given, to read; absent without DeepSpeed."""
        return self.inputs / "deepspeed.json"

    @property
    def tables(self) -> Path:
        """The tables that predictions can be executed on, where the dataset has them."""
        return self.inputs / "tables.jsonl"

    @property
    def logs(self) -> Path:
        """The folder of logs, one file per rank and stream, and the launcher's."""
        return self.root / "logs"

    def rank_log(self, rank: int, stream: str) -> Path:
        """Return the log of a rank; `stream` is stdout or stderr."""
        return self.logs / f"rank-{rank}.{stream}.log"

    @property
    def launcher_log(self) -> Path:
        """What pdsh or mpirun and DeepSpeed's runner printed."""
        return self.logs / "launcher.log"

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def prediction(self) -> Path:
        """The memory that the run was predicted to need."""
        return self.root / "prediction.json"

    @property
    def inquiry(self) -> Path:
        """What the notebook could not answer of it; gone once it is answered."""
        return self.root / "inquiry.json"

    @property
    def profile(self) -> Path:
        """The FLOPS profiler's own report."""
        return self.root / "profile.txt"

    @property
    def predictions(self) -> Path:
        """One JSON object a line: source, expected, predicted, exact_match."""
        return self.root / "predictions.jsonl"

    @property
    def model(self) -> Path:
        """The trained model, as `from_pretrained` loads it."""
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder of the last checkpoints that came back: step-N/<pod>/rank-R."""
        return self.root / "checkpoints"

    @property
    def arrivals(self) -> Path:
        """Where rank 0 writes what it leaves, when its pod sees this directory; gone at the end of the run."""
        return self.root / ".arrivals"

    @property
    def held(self) -> Path:
        """Where the checkpoints are that stayed on the pods; absent where there are none."""
        return self.root / "held.json"

    @property
    def manifest(self) -> Path:
        """SHA-256 of every file that came back from the pods; written last."""
        return self.root / "manifest.json"


@dataclass(frozen=True, slots=True)
class PodRunPaths:
    """The directory of a run on one pod, below the pod's root."""

    root: PurePosixPath

    @property
    def job(self) -> PurePosixPath:
        """The job as ranks read it: every option resolved, paths of this pod."""
        return self.root / "job.json"

    @property
    def request(self) -> PurePosixPath:
        """The request to the agent: ranks, environment, what to start."""
        return self.root / "request.json"

    @property
    def out(self) -> PurePosixPath:
        """What rank 0 leaves to be fetched: model/, predictions.jsonl, profile.txt."""
        return self.root / "out"

    @property
    def checkpoints(self) -> PurePosixPath:
        """The checkpoints of this run's ranks on this pod: step-N/rank-R."""
        return self.root / "checkpoints"

    @property
    def resume(self) -> PurePosixPath:
        """The checkpoint that this run goes on from: rank-R for each rank of the pod."""
        return self.root / "resume"

    @property
    def stop(self) -> PurePosixPath:
        """An empty file whose presence asks the trainer to stop after the step in progress; rank 0's pod has it."""
        return self.root / "stop"

    def rank(self, rank: int) -> PurePosixPath:
        """Return a rank's own folder: stdout.log, stderr.log, error.json, done.json."""
        return self.root / f"rank-{rank}"
