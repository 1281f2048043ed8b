"""`BenchmarkRow`: a run, or a skipped run, as a row of a benchmark: all columns of its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from enum import StrEnum
from pathlib import Path

from pydantic.dataclasses import dataclass

from workbench.rundir.result import Measurements

_IN_FRAMES = {
    "name": "id",
    "title": "name",
    "reason": "message",
}
"""Columns of a data frame of runs whose names are not the field's."""


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    STOPPED = "stopped"
    """It was asked to stop, and ended by itself before its last step."""
    CANCELLED = "cancelled"
    SKIPPED = "skipped"
    """Never started: the planner predicts that the row cannot fit."""
    RUNNING = "running"
    WAITING = "waiting"

    @property
    def is_terminal(self) -> bool:
        """Whether the row will not change any more."""
        return self not in (Outcome.RUNNING, Outcome.WAITING)


_STATES = {Outcome.OUT_OF_MEMORY: "failed", Outcome.WAITING: "queued", Outcome.SKIPPED: ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    versions: Mapping[str, str] = field(default_factory=dict)
    """By package, as the pods reported them."""
    device: str = ""
    """Name of the processor that trained: torch's name of the GPU, or the CPU's model name."""
    devices: int | None = None
    """How many of them, all pods together."""
    commit: str = ""
    """Commit of the repository at submission, with `+changes` if files differ; empty without a
    repository."""
    seed: int | None = None
    command: str = ""
    data: str = ""
    """Fingerprint of the training and evaluation rows; equal texts mean equal data."""
    code: str = ""
    """Fingerprint of the workbench package that ran (and of the script's folder, for a script)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRow(Measurements):
    """A row of a benchmark: its job, outcome and measurements. Unknown values are None."""

    name: str
    """The run's id, or for a row that never started the key of its spec."""
    outcome: Outcome
    path: Path | None = None
    """The run directory; None for a row that never started."""
    title: str = ""
    """Name of the run, set by `run.name = …`."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """Specification as in `spec.json`: `{"cluster": …, "job": …}`. It runs the row again alone."""
    key: str = ""
    """Fingerprint of job, number of pods and slots: repeats of a row have equal keys."""
    repeat: int = 0
    """Number of the repeat within its key, from 0."""
    from_disk: bool = False
    reason: str = ""
    """Reason of a failure or skip, on a single line; empty after a success."""
    wanted_gib: float | None = None
    free_gib: float | None = None
    """GiB that were free then (of a GPU), or the limit of the pod (on a CPU)."""

    model: str = ""
    technique: str = ""
    """The technique, with `peft` behind a blank where there is one."""
    precision: str = ""
    launcher: str = ""
    pods: int = 0
    world_size: int = 0
    """Ranks on all of them."""
    per_device_batch: int | None = None
    """Rows in a micro-batch of one rank."""
    accumulation: int | None = None
    """Micro-batches per optimizer step."""
    global_batch_size: int | None = None
    """Rows per optimizer step."""
    sequence: str = ""
    """Cut and padding of sequences in words: `source 96, target 96, padded to the longest`."""
    dataset: str = ""

    perplexity: float | None = None
    """e to the power of `eval_loss`: the number of tokens among which the model still hesitates.

    None for an encoder-decoder model, unless `metrics` names `perplexity`.
    """
    exact_match: float | None = None
    """Share of answered evaluation rows with exactly the right text, 0 to 1."""
    useful_tokens_per_s: float | None = None
    """Tokens per second without padding, source and target, all ranks together."""
    padded_tokens_per_s: float | None = None
    """Tokens per second with padding, source and target, all ranks together."""
    train_samples_per_s: float | None = None
    """Rows a second in the training loop, all ranks together."""
    tflops_per_device: float | None = None
    """10^12 floating-point operations a second and device that training needed (no recomputation
    counted in)."""
    mfu: float | None = None
    """`tflops_per_device` over the device's peak at this precision, 0 to 1; None where the peak is
    not known."""
    speed_up: float | None = None
    """`train_samples_per_s` over the value of the comparable one-pod row; set by the comparison."""
    efficiency: float | None = None
    """`speed_up` over the ratio of ranks, 0 to 1; set by the comparison."""

    peak_memory_gib: float | None = None
    """The highest of the pods' measured peaks: reserved CUDA memory on GPUs, resident memory on
    CPUs."""
    memory_kind: str = ""
    """Kind of memory: `cuda` or `resident`."""
    predicted_memory_gib: float | None = None
    """The planner's figure for the same memory."""
    host_memory_gib: float | None = None
    """Highest resident memory of the pods in GiB, for any device."""

    pod_hours: float | None = None
    """Pods x `duration_s` / 3600."""
    cost: float | None = None
    """`pod_hours` x the price that the user gave, in the user's money; None without a price."""
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def state(self) -> str:
        """State of the row's run. Empty: the row never started."""
        return _STATES.get(self.outcome, self.outcome)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form; the path as text."""
        data = asdict(self)
        data["path"] = str(self.path) if self.path else None
        return data

    def figures(self) -> dict[str, object]:
        """Return the row of a data frame, with the columns of any run's row."""
        facts = self.to_dict()
        del facts["spec"], facts["provenance"]
        figures = {_IN_FRAMES.get(name, name): value for name, value in facts.items()}
        technique, _, peft = self.technique.partition(" ")
        figures |= {"technique": technique, "peft": peft, "state": self.state}
        for name in ("device", "devices", "seed", "commit"):
            figures[name] = getattr(self.provenance, name)
        return figures
