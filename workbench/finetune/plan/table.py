"""`PlanTable`: what a job needs under every technique and how fast it will be, a row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from workbench.base.errors import ConfigError
from workbench.base.shown import Shown
from workbench.base.words import counted
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import Memory
from workbench.pods.doctor.exchange import Exchange

GIB = 2**30


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    NOT = "does not fit"
    UNKNOWN = "no limit given"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long a job's steps take on one pod that nothing slows down."""

    rows: int
    """Rows of a micro-batch."""
    micro_batch_s: float
    """Seconds of its forward and backward pass."""
    update_s: float
    """Seconds of all else in an optimizer step."""

    @classmethod
    def of(cls, *, rows: int, step_s: float, micro_batch_s: float, accumulation: int) -> Pace:
        """Work it out from the steps of a run on one pod.

        Example:
            >>> Pace.of(rows=8, step_s=0.75, micro_batch_s=0.25, accumulation=2).update_s
            0.25
        """
        update_s = max(0.0, step_s - accumulation * micro_batch_s)
        return cls(rows=rows, micro_batch_s=micro_batch_s, update_s=update_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    technique: str
    fit: Fit
    gpu: Memory | None = None
    """On one GPU, in bytes; None where it computes on CPUs or is refused."""
    host: Memory | None = None
    """In one pod's own memory, all its ranks together, in bytes, at the stage that needs most; None where refused."""
    stages: Mapping[str, Memory] = field(default_factory=dict)
    """The same of every stage: `loading`, `training` and `saving`."""
    gpus_on_pod: int = 0
    """GPUs of a pod that it uses."""
    ranks: int = 0
    """Ranks on all pods."""
    micro_batch: int | None = None
    """The most rows of a micro-batch that fit; 0 where not even one does, None where there is no limit."""
    cheapest: bool = False
    """Whether it is the one that fits and moves least over the network."""
    why: str = ""
    """Why it is refused."""
    step_s: float | None = None
    """Seconds of an optimizer step; None where nothing was timed."""
    samples_per_s: float | None = None
    """Rows a second, all ranks together."""
    speed_up: float | None = None
    """That over what one pod makes with `single` and the same micro-batches a step."""
    pod_hours: float | None = None
    """Hours of pods for a million rows."""
    cost: float | None = None
    """The same in the user's money; None without a price."""

    @property
    def gpu_gib(self) -> float | None:
        """GiB that one GPU needs; None without GPUs."""
        return None if self.gpu is None else self.gpu.total / GIB

    @property
    def pod_gpu_gib(self) -> float | None:
        """GiB that all GPUs of a pod need together; None without GPUs."""
        return None if self.gpu is None else self.gpu.total * self.gpus_on_pod / GIB

    @property
    def host_gib(self) -> float | None:
        """GiB that a pod's own memory needs; None where it is refused."""
        return None if self.host is None else self.host.total / GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTable(Shown):
    """What a job needs under every technique, as predicted."""

    model: str
    parameters: int
    """Elements of its weights, adapters among them."""
    trained: int
    pods: int
    gpu_memory_gib: float | None
    """Memory of one GPU; None for CPUs."""
    memory_gib: float | None
    """Memory of one pod; None where it is not known."""
    job: FineTune
    lengths: tuple[int, int]
    """Tokens of a row: source and target."""
    rows: Sequence[PlanRow]
    paces: Mapping[str, Pace] = field(default_factory=dict)
    """One pod's timed steps by technique; empty where nothing was timed."""
    exchange: Exchange | None = None
    """What was measured between the pods."""
    speed_ups: Mapping[int, float] = field(default_factory=dict)
    """The most that several pods make of one by `gradient_accumulation_steps`, the job's and its doublings up to 64
    times, `local-sgd` left out; empty where no speed is known."""
    scheduling: str = ""
    """Whether a Kubernetes cluster would schedule the pods now, or more of them; empty where that was not looked at."""

    @property
    def pays_from(self) -> int | None:
        """The least of these with which several pods are faster than one; None where none is."""
        return next((k for k, speed_up in self.speed_ups.items() if speed_up > 1), None)

    @property
    def fastest(self) -> PlanRow | None:
        """The fastest row that fits, `local-sgd` left out, which changes the result; None where no speed is known."""
        speeds = [
            row
            for row in self.rows
            if row.samples_per_s and technique_of(row.technique).same_losses
        ]
        fitting = [row for row in speeds if row.fit in (Fit.FITS, Fit.TIGHT, Fit.UNKNOWN)]
        return max(fitting, key=lambda row: row.samples_per_s or 0.0, default=None)

    @property
    def cheapest(self) -> PlanRow | None:
        """The row that fits and moves least over the network; None where none fits."""
        return next((row for row in self.rows if row.cheapest), None)

    def row(self, technique: str) -> PlanRow:
        for row in self.rows:
            if row.technique == technique:
                return row
        raise ConfigError(f"the plan has no technique {technique!r}")

    def __repr__(self) -> str:
        best = f"cheapest: {self.cheapest.technique}" if self.cheapest else "none fits"
        return f"PlanTable({self.model} on {counted(self.pods, 'pod')}, {best})"
