"""What a benchmark will take, before it starts: memory by the planner, time from rows that stand; nothing guessed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.base.errors import WorkbenchError
from workbench.base.shown import Shown
from workbench.benchmark.grid import LeftOut
from workbench.benchmark.row import Outcome, Row
from workbench.jobs.finetune import FineTune
from workbench.planner.plan import machine_memory_gib, predict
from workbench.rundir.spec import RunSpec

__all__ = ["Expected", "Foreseen", "Outlook", "OutlookRow", "expected_time", "foresee_memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """What a row is predicted to need of each pod."""

    memory_gib: float | None = None
    """GiB of the memory that decides: of a pod's GPUs where it computes there, else of the pod's own; None where the
    planner cannot say."""
    refusal: str = ""
    """Why it cannot fit; empty where it can, or nobody knows."""
    unknown: str = ""
    """Why nothing is predicted; empty where something is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """How long a row is expected to take."""

    seconds: float | None = None
    """Seconds; None where nothing that stands tells."""
    basis: str = "not known yet"
    """Where that is from: `measured before`, `estimated from …`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlookRow:
    """One row before it starts."""

    name: str
    """What it is, in words."""
    runs: int
    """How many runs of it there are."""
    foreseen: Foreseen
    """Its memory."""
    expected: Expected
    """Its time, of one run."""
    standing: int = 0
    """How many of its runs stand on disk already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook(Shown):
    """A benchmark before it starts. Prints, and shows in a notebook, as a table."""

    name: str
    """What the benchmark is called."""
    rows: tuple[OutlookRow, ...]
    """One a row, repeats together."""
    left_out: tuple[LeftOut, ...] = ()
    """Combinations that are no rows."""
    folder: Path = Path()
    """Where its runs are kept."""

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(row.runs for row in self.rows)

    @property
    def to_go(self) -> int:
        """Number of runs that neither stand nor are skipped."""
        return sum(row.runs - row.standing for row in self.rows if not row.foreseen.refusal)

    @property
    def seconds(self) -> float:
        """Seconds that the runs to go take, as far as their time is known."""
        return sum(
            (row.runs - row.standing) * (row.expected.seconds or 0.0) for row in self.rows if not row.foreseen.refusal
        )

    @property
    def untold(self) -> int:
        """Number of runs to go whose time is not known yet."""
        rows = [row for row in self.rows if not row.foreseen.refusal and row.expected.seconds is None]
        return sum(row.runs - row.standing for row in rows)

    def __repr__(self) -> str:
        """Return how many runs there are."""
        return f"Outlook({self.name}: {len(self.rows)} rows, {self.runs} runs, {self.to_go} to go)"


def foresee_memory(spec: RunSpec, *, gpu_memory_gib: float | None = None, trace: bool = True) -> Foreseen:
    """Predict what a row needs of each pod, and whether that cannot fit; takes seconds for a model not seen before."""
    job, pods, pod = spec.job, spec.pods or spec.cluster.count, spec.cluster.pods
    if not isinstance(job, FineTune):
        return Foreseen(unknown="of a script nothing is predicted")
    try:
        row = predict(job, pods=pods, gpus=pod.gpus, trace=trace)
    except WorkbenchError as error:
        return Foreseen(unknown=str(error))
    if row is None:
        return Foreseen(unknown="this model was not traced yet")
    limit_gib = pod.memory_gib
    if limit_gib is None and spec.cluster.backend.get("kind") == "local":
        limit_gib = machine_memory_gib() / pods
    lacks = []
    if row.gpu_gib is not None and gpu_memory_gib is not None and row.gpu_gib > gpu_memory_gib:
        lacks.append(f"predicted {row.gpu_gib:.2f} GiB of each GPU's memory; a GPU has {gpu_memory_gib:.2f} GiB")
    if row.host_gib is not None and limit_gib is not None and row.host_gib > limit_gib:
        lacks.append(f"predicted {row.host_gib:.2f} GiB of each pod's memory; a pod has {limit_gib:.2f} GiB")
    memory_gib = row.host_gib if row.pod_gpu_gib is None else row.pod_gpu_gib
    return Foreseen(memory_gib=memory_gib, refusal="; ".join(lacks))


def expected_time(row: Row, standing: Sequence[Row]) -> Expected:
    """Return how long a row takes, from rows that were run before."""
    done = [r for r in standing if r.outcome is Outcome.SUCCEEDED and r.duration_s is not None]
    same = [r.duration_s for r in done if r.key == row.key and r.duration_s is not None]
    if same:
        return Expected(seconds=statistics.median(same), basis="measured before")
    alike = [_Step.of(r) for r in done if _shape(r) == _shape(row)]
    steps, rows = _steps(row), (row.per_device_batch or 0) * (row.accumulation or 0)
    told = [step for step in alike if step is not None]
    if not told or not steps or not rows:
        return Expected()
    beside_s = statistics.median(step.beside_s for step in told)
    twin = [step.seconds for step in told if (step.ranks, step.rows) == (row.slots, rows)]
    if twin:
        seconds = beside_s + steps * statistics.median(twin)
        return Expected(seconds=seconds, basis="estimated from as many pods and rows")
    alone = [step for step in told if step.ranks == 1]
    several = [step for step in told if step.ranks > 1]
    if not alone or (row.slots > 1 and not several):
        return Expected()
    compute_s = statistics.median(step.seconds / step.rows for step in alone)
    network_s = statistics.median(max(0.0, s.seconds - s.rows * compute_s) for s in several) if row.slots > 1 else 0.0
    seconds = beside_s + steps * (rows * compute_s + network_s)
    return Expected(seconds=seconds, basis="estimated from other pod counts")


@dataclass(frozen=True, slots=True)
class _Step:
    """A step as a finished row tells of it."""

    ranks: int
    rows: int
    seconds: float
    beside_s: float

    @classmethod
    def of(cls, row: Row) -> _Step | None:
        rows = (row.per_device_batch or 0) * (row.accumulation or 0)
        if not row.steps or not rows or row.train_runtime_s is None or row.duration_s is None:
            return None
        beside_s = max(0.0, row.duration_s - row.train_runtime_s)
        return cls(row.slots, rows, row.train_runtime_s / row.steps, beside_s)


def _shape(row: Row) -> tuple[object, ...]:
    """Return what must be equal for one row to tell of another's time."""
    cluster = row.spec.get("cluster")
    raw = cluster if isinstance(cluster, dict) else {}
    backend, pod = raw.get("backend"), raw.get("pods")
    where = backend.get("kind") if isinstance(backend, dict) else None
    size = (pod.get("cpus"), pod.get("gpus")) if isinstance(pod, dict) else None
    return row.model, row.technique, row.precision, row.launcher, row.sequence, row.dataset, where, size


def _steps(row: Row) -> int | None:
    job = row.spec.get("job")
    asked = job.get("max_steps") if isinstance(job, dict) else None
    return asked if isinstance(asked, int) else None
