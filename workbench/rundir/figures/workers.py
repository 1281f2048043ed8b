"""Compute epochs, and time and memory of every worker and GPU, from a run's events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic.dataclasses import dataclass

from workbench.base.json_values import number, parts, whole
from workbench.rundir.events import Event, EventKind
from workbench.rundir.tolerant import Number, Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochTime:
    """Duration of a pass over the training rows, without evaluations and checkpoints."""

    epoch: Number
    """Number of passes at the end; a fraction if training ended within the pass."""
    steps: Whole
    """Number of optimizer steps in the pass."""
    seconds: Number
    """Duration in seconds, by the slowest rank's clock."""

    @property
    def steps_per_s(self) -> float | None:
        """Optimizer steps per second. None: the pass took no time."""
        return self.steps / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUse:
    rank: Whole
    pod: str = ""
    """Name of the pod. Empty: unknown."""
    seconds: Number | None = None
    """Seconds in training steps so far. None before the end of the first epoch."""
    peak_rss_gib: Number | None = None
    """Peak of resident memory in GiB."""
    peak_cuda_gib: Number | None = None
    """Peak of reserved GPU memory in GiB. None: no GPU."""
    threads: Whole | None = None
    """Number of threads in torch's own pool."""
    cores: str = ""
    """Allowed cores, such as `0-3,8`. Empty: unknown."""
    backend: str = ""
    """Library of the collectives, `gloo` or `nccl`. Empty: a single rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUse:
    """Load and memory of a pod's GPU, from its driver."""

    pod: str
    index: Whole
    """Number of the GPU on the pod."""
    peak_gib: Number | None = None
    """Peak of used memory in GiB, over all processes."""
    total_gib: Number | None = None
    """Total memory in GiB."""
    percent: Number | None = None
    """Mean load over the samples, 0 to 100."""
    looks: Whole = 0


class WorkerBook:
    """Collect the events of epochs, workers and GPUs."""

    def __init__(self) -> None:
        self._ends: dict[float, dict[int, tuple[int, float]]] = {}
        self._workers: dict[int, WorkerUse] = {}
        self._gpus: dict[tuple[str, int], GpuUse] = {}

    def take(self, event: Event) -> None:
        match event.kind:
            case EventKind.SAMPLE:
                for gpu in parts(event.data.get("gpus")):
                    self._gpu(event.text("pod"), gpu)
            case EventKind.RESTARTED:
                self._workers = {}
            case EventKind.EPOCH if event.rank is not None:
                self._epoch(event.rank, event)
            case EventKind.DEVICE if event.rank is not None:
                pod = event.text("pod")
                threads = event.whole("threads")
                cores = event.text("cores")
                backend = event.text("backend")
                before = self._of(event.rank)
                self._workers[event.rank] = replace(
                    before, pod=pod, threads=threads, cores=cores, backend=backend
                )
            case EventKind.MEMORY if event.rank is not None:
                worker = self._of(event.rank)
                rss = _most(worker.peak_rss_gib, number(event.data.get("peak_rss_gib")))
                cuda = _most(worker.peak_cuda_gib, number(event.data.get("cuda_reserved_gib")))
                self._workers[event.rank] = replace(worker, peak_rss_gib=rss, peak_cuda_gib=cuda)

    def _of(self, rank: int) -> WorkerUse:
        return self._workers.get(rank, WorkerUse(rank=rank))

    def _epoch(self, rank: int, event: Event) -> None:
        # A rank may print any number, so only finite numbers count.
        epoch, seconds, total_s = (
            number(event.data.get(name)) for name in ("epoch", "seconds", "total_s")
        )
        steps = event.whole("steps")
        if epoch is not None and steps and seconds is not None:
            self._ends.setdefault(epoch, {})[rank] = steps, seconds
            self._workers[rank] = replace(self._of(rank), seconds=total_s)

    def _gpu(self, pod: str, raw: Mapping[str, object]) -> None:
        if (index := whole(raw.get("index"))) is None:
            return
        gpu = self._gpus.get((pod, index), GpuUse(pod=pod, index=index))
        looks = gpu.looks
        busy = number(raw.get("percent"))
        mean = gpu.percent
        if busy is not None:
            mean = ((mean or 0.0) * looks + busy) / (looks + 1)
            looks = looks + 1
        peak = _most(gpu.peak_gib, number(raw.get("used_gib")))
        total = number(raw.get("total_gib"))
        self._gpus[pod, index] = replace(
            gpu, peak_gib=peak, total_gib=total, percent=mean, looks=looks
        )

    @property
    def epochs(self) -> Sequence[EpochTime]:
        ends = ((epoch, list(ranks.values())) for epoch, ranks in sorted(self._ends.items()))
        return [
            EpochTime(epoch=e, steps=took[0][0], seconds=max(s for _, s in took))
            for e, took in ends
        ]

    @property
    def workers(self) -> Sequence[WorkerUse]:
        return [worker for _, worker in sorted(self._workers.items())]

    @property
    def gpus(self) -> Sequence[GpuUse]:
        return [gpu for _, gpu in sorted(self._gpus.items())]


def _most(before: float | None, now: float | None) -> float | None:
    return max((value for value in (before, now) if value is not None), default=None)
