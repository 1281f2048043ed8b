"""The forecast of a benchmark: memory by the planner, time from rows on disk; no guesses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.json_values import part, whole
from workbench.base.shown import Shown
from workbench.benchmark.grid import LeftOut
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.rundir.spec import RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Predicted memory of a row on every pod."""

    gib: float | None = None
    """GiB of a pod's GPUs where it computes there, else of the pod's own; None where the planner
    cannot tell."""
    refusal: str = ""
    """Reason why the row cannot fit; empty if it fits or the answer is unknown."""
    unknown: str = ""
    """Why nothing is predicted; empty where something is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeForecast:
    seconds: float | None = None
    """Seconds; None where no row on disk tells."""
    basis: str = "not known yet"
    """Where that is from: `measured before`, `estimated from …`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastRow:
    name: str
    runs: int
    memory: MemoryForecast
    time: TimeForecast
    finished: int = 0
    """How many of its runs are finished on disk already."""

    @property
    def to_go(self) -> int:
        """Number of runs that are neither finished nor skipped."""
        if self.memory.refusal:
            return 0
        return self.runs - self.finished


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkForecast(Shown):
    """A benchmark before it starts. Prints, and shows in a notebook, as a table."""

    name: str
    rows: tuple[ForecastRow, ...]
    """One a row, repeats together."""
    left_out: tuple[LeftOut, ...] = ()
    folder: Path = Path()

    @property
    def runs(self) -> int:
        return sum(row.runs for row in self.rows)

    @property
    def to_go(self) -> int:
        """Number of runs that are neither finished nor skipped."""
        return sum(row.to_go for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds that the runs to go take, as far as their time is known."""
        return sum(row.to_go * (row.time.seconds or 0.0) for row in self.rows)

    @property
    def without_time(self) -> int:
        """Number of runs to go whose time is not known yet."""
        return sum(row.to_go for row in self.rows if row.time.seconds is None)

    def __repr__(self) -> str:
        return (
            f"BenchmarkForecast({self.name}: {len(self.rows)} "
            f"rows, {self.runs} runs, {self.to_go} to go)"
        )


def forecast_memory(spec: RunSpec, *, gpu_memory_gib: float | None = None) -> MemoryForecast:
    """Predict a row's memory on every pod, and whether it fits; takes seconds for a new model."""
    cluster = spec.cluster
    pods = spec.pods or cluster.count
    hardware = cluster.pods
    forecast = spec.job.views.forecast(pods=pods, gpus=hardware.gpus, ranks=hardware.ranks)
    if forecast is None:
        return MemoryForecast(unknown=f"the memory of a {spec.job.kind} job is not predicted")
    try:
        need = forecast.memory()
    except WorkbenchError as error:
        return MemoryForecast(unknown=str(error))
    gib = need.pod_gpu_gib
    if gib is None:
        gib = need.host_gib
    pod_memory_gib = cluster.pod_memory_gib(pods)
    lacks = [
        _lack(need.gpu_gib, gpu_memory_gib, "GPU"),
        _lack(need.host_gib, pod_memory_gib, "pod"),
    ]
    refusal = "; ".join(filter(None, lacks))
    return MemoryForecast(gib=gib, refusal=refusal)


def _lack(need_gib: float | None, limit_gib: float | None, place: str) -> str:
    """Return the reason why a need does not fit; empty if the need fits or is unknown."""
    if need_gib is None or limit_gib is None or need_gib <= limit_gib:
        return ""
    return (
        f"predicted {need_gib:.2f} GiB of each {place}'s memory; a {place} has {limit_gib:.2f} GiB"
    )


def forecast_time(row: BenchmarkRow, before: Sequence[BenchmarkRow]) -> TimeForecast:
    """Return how long a row takes, by rows that were run before."""
    done = [earlier for earlier in before if earlier.outcome is Outcome.SUCCEEDED]
    # The very same row was measured.
    durations = [earlier.duration_s for earlier in done if earlier.key == row.key]
    same = [duration_s for duration_s in durations if duration_s is not None]
    if same:
        return TimeForecast(seconds=statistics.median(same), basis="measured before")
    # Rows of the same work on any number of pods.
    job = part(row.spec, "job")
    steps = whole(job.get("max_steps"))
    rows = _rows_per_step(row)
    shape = _shape(row)
    measured = [_Step.of(earlier) for earlier in done if _shape(earlier) == shape]
    alike = [step for step in measured if step is not None]
    if not alike or not steps or not rows:
        return TimeForecast()
    beside_s = statistics.median(step.beside_s for step in alike)
    # Rows with as many ranks and rows a step.
    twin = []
    for step in alike:
        if step.ranks == row.world_size and step.rows == rows:
            twin.append(step.seconds)
    if twin:
        seconds = beside_s + steps * statistics.median(twin)
        return TimeForecast(seconds=seconds, basis="estimated from as many pods and rows")
    # The seconds of a row come from one rank, those of the network from several ranks.
    alone = [step for step in alike if step.ranks == 1]
    several = [step for step in alike if step.ranks > 1]
    if not alone or (row.world_size > 1 and not several):
        return TimeForecast()
    row_s = [step.seconds / step.rows for step in alone]
    compute_s = statistics.median(row_s)
    network_s = 0.0
    if row.world_size > 1:
        beyond_s = [step.seconds - step.rows * compute_s for step in several]
        network_s = statistics.median(max(0.0, seconds) for seconds in beyond_s)
    step_s = rows * compute_s + network_s
    seconds = beside_s + steps * step_s
    return TimeForecast(seconds=seconds, basis="estimated from other pod counts")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a finished row, and the seconds beside its training loop."""

    ranks: int
    rows: int
    seconds: float
    beside_s: float

    @classmethod
    def of(cls, row: BenchmarkRow) -> _Step | None:
        rows = _rows_per_step(row)
        if not row.steps or not rows:
            return None
        if row.train_runtime_s is None or row.duration_s is None:
            return None
        beside_s = row.duration_s - row.train_runtime_s
        return cls(
            ranks=row.world_size,
            rows=rows,
            seconds=row.train_runtime_s / row.steps,
            beside_s=max(0.0, beside_s),
        )


def _rows_per_step(row: BenchmarkRow) -> int:
    """Return the rows of a rank in an optimizer step; 0 if unknown."""
    micro_batch = row.per_device_batch or 0
    return micro_batch * (row.accumulation or 0)


def _shape(row: BenchmarkRow) -> tuple[object, ...]:
    """Return the facts that rows with equal times share."""
    cluster = part(row.spec, "cluster")
    backend = part(cluster, "backend")
    pod = part(cluster, "pods")
    return (
        row.model,
        row.technique,
        row.precision,
        row.launcher,
        row.sequence,
        row.dataset,
        backend.get("kind"),
        pod.get("cpus"),
        pod.get("gpus"),
    )
