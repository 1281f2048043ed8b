"""The forecast of a benchmark: runs to go, and memory by the planner."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base.display_protocol import Displayable
from workbench.base.errors import WorkbenchError
from workbench.benchmark.grid import LeftOut
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
class ForecastRow:
    name: str
    runs: int
    memory: MemoryForecast
    finished: int = 0
    """How many of its runs are finished on disk already."""

    @property
    def to_go(self) -> int:
        """Number of runs that are neither finished nor skipped."""
        if self.memory.refusal:
            return 0
        return self.runs - self.finished


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkForecast(Displayable):
    """A benchmark before it starts. Prints, and shows in a notebook, as a table."""

    name: str
    rows: tuple[ForecastRow, ...]
    """One a row, repeats together."""
    left_out: tuple[LeftOut, ...] = ()

    @property
    def runs(self) -> int:
        return sum(row.runs for row in self.rows)

    @property
    def to_go(self) -> int:
        """Number of runs that are neither finished nor skipped."""
        return sum(row.to_go for row in self.rows)

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
