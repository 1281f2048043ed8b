"""`PlanTable`: the predicted need and speed of a job, a row per technique."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from workbench.base.errors import ConfigError
from workbench.base.shown import Shown
from workbench.base.words import counted
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.plan.calibration import Calibration
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
    """Step times of a job on a single pod without any slowdown."""

    rows: int
    """Rows of a micro-batch."""
    micro_batch_s: float
    """Seconds of the forward and backward pass of a micro-batch."""
    update_s: float
    """Seconds of an optimizer step without its micro-batches."""

    @classmethod
    def of(cls, *, rows: int, step_s: float, micro_batch_s: float, accumulation: int) -> Pace:
        """Compute the pace from the steps of a run on a single pod.

        Example:
            >>> Pace.of(rows=8, step_s=0.75, micro_batch_s=0.25, accumulation=2).update_s
            0.25
        """
        update_s = max(0.0, step_s - accumulation * micro_batch_s)
        return cls(rows=rows, micro_batch_s=micro_batch_s, update_s=update_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Timed steps of a job under a technique, as the median step of a short run."""

    technique: str
    pods: int
    rows: int
    """Rows of a micro-batch."""
    accumulation: int
    """Micro-batches of a step, at least two."""
    step_s: float
    micro_batch_s: float
    """Seconds of the forward and backward pass of a micro-batch other than the last."""

    @property
    def pace(self) -> Pace:
        return Pace.of(
            rows=self.rows,
            step_s=self.step_s,
            micro_batch_s=self.micro_batch_s,
            accumulation=self.accumulation,
        )


Turn = tuple[TimedStep, ...]
"""Timed steps of all techniques, right after each other, with `single` on a pod first and last."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Range that a predicted figure is expected in."""

    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Return whether the ranges have a number in common.

        Example:
            >>> Interval(1.0, 1.5).overlaps(Interval(1.25, 2.0))
            True
            >>> Interval(1.0, 1.25).overlaps(Interval(1.5, 2.0))
            False
        """
        return self.low <= other.high and other.low <= self.high

    def of(self, figure: Callable[[float], float]) -> Interval:
        """Return the interval of a figure that only grows, or only falls, with this one.

        Example:
            >>> Interval(2.0, 4.0).of(lambda seconds: 1 / seconds)
            Interval(low=0.25, high=0.5)
        """
        ends = figure(self.low), figure(self.high)
        return Interval(min(ends), max(ends))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    technique: str
    fit: Fit
    gpu: Memory | None = None
    """Memory on a single GPU, in bytes. None: the technique computes on CPUs or is refused."""
    host: Memory | None = None
    """Memory of a pod, all ranks together, in bytes, at the stage with the most. None: refused."""
    stages: Mapping[str, Memory] = field(default_factory=dict)
    """Memory of a pod by stage: `loading`, `training` and `saving`."""
    gpus_on_pod: int = 0
    """GPUs in use per pod."""
    ranks: int = 0
    """Ranks on all pods."""
    micro_batch: int | None = None
    """The most rows of a micro-batch that fit. 0: not even a single row fits. None: no limit."""
    cheapest: bool = False
    """Whether the row fits with the least network traffic."""
    why: str = ""
    """Reason for the refusal."""
    step_s: float | None = None
    """Seconds of an optimizer step. None: no step was timed."""
    samples_per_s: float | None = None
    """Rows per second, all ranks together."""
    speed_up: float | None = None
    """Speed relative to a single pod with `single` and the same micro-batches per step."""
    pod_hours: float | None = None
    """Pod-hours for a million rows."""
    cost: float | None = None
    """Price of a million rows in the user's money. None: no price was passed."""
    within: Mapping[str, Interval] = field(default_factory=dict)
    """Interval of every predicted figure of speed and cost, by the name of its field."""

    @property
    def gpu_gib(self) -> float | None:
        """GiB needed on a single GPU. None: no GPUs."""
        return None if self.gpu is None else self.gpu.total / GIB

    @property
    def pod_gpu_gib(self) -> float | None:
        """GiB needed on all GPUs of a pod together. None: no GPUs."""
        return None if self.gpu is None else self.gpu.total * self.gpus_on_pod / GIB

    @property
    def host_gib(self) -> float | None:
        """GiB needed of a pod's own memory. None: the technique is refused."""
        return None if self.host is None else self.host.total / GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTable(Shown):
    """Predicted need of a job under every technique."""

    model: str
    parameters: int
    """Number of weights, adapters included."""
    trained: int
    pods: int
    gpu_memory_gib: float | None
    """Memory of a GPU in GiB. None: CPUs."""
    memory_gib: float | None
    """Memory of a pod in GiB. None: unknown."""
    job: FineTune
    lengths: tuple[int, int]
    """Tokens of a row: source and target."""
    rows: Sequence[PlanRow]
    turns: Sequence[Turn] = ()
    """Timed steps of the job, a turn after another. Empty: no step was timed."""
    exchange: Exchange | None = None
    """Measurement of the network between the pods."""
    speed_ups: Mapping[int, float] = field(default_factory=dict)
    """Largest speed of several pods relative to a single pod, by `gradient_accumulation_steps`.

    The keys are the job's number and its doublings up to 64 times the number. `local-sgd` is left
    out. Empty: no speed is known.
    """
    scheduling: str = ""
    """Whether Kubernetes could schedule the pods, or more pods, now. Empty: not checked."""
    calibration: Calibration | None = None
    """Measured steps of shallow copies of the model. They scale the memory. None: not measured.

    Without `turns`, the times predict the speeds, if the plan's rows have the same lengths.
    """

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of source and target that the job allows."""
        return self.job.planned_lengths

    @property
    def pays_from(self) -> int | None:
        """Least accumulation at which several pods are faster than a single pod, or None."""
        return next((k for k, speed_up in self.speed_ups.items() if speed_up > 1), None)

    @property
    def fastest(self) -> PlanRow | None:
        """Fastest fitting row without `local-sgd`, which changes losses.

        None: no technique was timed, or the interval of another row overlaps.
        """
        leaders = self.leaders
        return leaders[0] if len(leaders) == 1 else None

    @property
    def leaders(self) -> list[PlanRow]:
        """Fitting rows that may be the fastest, the fastest by its figure first.

        The interval of every row overlaps the interval of the first. `local-sgd` is left out. No
        rows: no technique was timed.
        """
        # Copies of the model time `single` alone, which compares no techniques.
        if not self.turns:
            return []
        fitting = []
        for row in self.rows:
            if row.fit not in (Fit.FITS, Fit.TIGHT, Fit.UNKNOWN):
                continue
            if row.samples_per_s and technique_of(row.technique).same_losses:
                fitting.append(row)
        fitting.sort(key=lambda row: row.samples_per_s or 0.0, reverse=True)
        if not fitting:
            return []
        best = fitting[0].within["speed_up"]
        return [row for row in fitting if row.within["speed_up"].overlaps(best)]

    @property
    def cheapest(self) -> PlanRow | None:
        """Fitting row with the least network traffic. None: no row fits."""
        return next((row for row in self.rows if row.cheapest), None)

    def row(self, technique: str) -> PlanRow:
        for row in self.rows:
            if row.technique == technique:
                return row
        raise ConfigError(f"the plan has no technique {technique!r}")

    def __repr__(self) -> str:
        best = f"cheapest: {self.cheapest.technique}" if self.cheapest else "none fits"
        return f"PlanTable({self.model} on {counted(self.pods, 'pod')}, {best})"
