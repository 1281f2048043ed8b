"""Compute epochs, and time and memory of every worker and GPU, from a run's reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from pydantic.dataclasses import dataclass

from workbench.base.json_values import as_float, as_int, as_list
from workbench.base.machine.nvml import THROTTLE_REASONS, THROTTLED
from workbench.base.record.tolerant import Number, Whole
from workbench.base.words import count, duration, number, percent
from workbench.rundir.events import Event, EventKind

_SLOW = 1.25
_SLOW_SHARE = 0.05
"""A rank is slow if its own work takes `_SLOW` times the median of the ranks or longer, and the
difference is at least this share of a step. The kernel's scheduling alone stays below."""


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
        if not self.seconds:
            return None
        return self.steps / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerUse:
    rank: Whole
    pod: str = ""
    """Name of the pod. Empty: unknown."""
    seconds: Number | None = None
    """Seconds in training steps so far. None before the end of the first epoch."""
    own_s: Number | None = None
    """Mean seconds in a step of work in which the rank waits for no other: fetching rows, and
    forward passes if ranks run them alone. Of the last minute of steps. None: unknown."""
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
    ecc_errors: Whole | None = None
    """Uncorrected memory errors since the driver was loaded. None: none, or unknown."""
    throttled_looks: Whole = 0
    """Samples with a clock lowered by heat or by the hardware, but not by the power limit."""
    throttle: Whole = 0
    """Reasons for the lowered clock, as bits of NVML."""
    least_mhz: Number | None = None
    """Lowest clock of the processors in those samples, in MHz. None: no such sample."""
    most_mhz: Number | None = None
    """Highest clock of the GPU in MHz. None: no such sample."""

    @property
    def trouble(self) -> str:
        """Words on memory errors and lowered clocks. Empty: neither was seen."""
        parts = []
        if self.ecc_errors:
            parts.append(f"{count(self.ecc_errors)} uncorrected ECC errors")
        if self.throttled_looks:
            reasons = [THROTTLE_REASONS[bit] for bit in THROTTLE_REASONS if self.throttle & bit]
            share = percent(self.throttled_looks / max(self.looks, self.throttled_looks))
            clocks = f", at {self.least_mhz or 0:,.0f} of {self.most_mhz or 0:,.0f} MHz"
            reason = " and ".join(dict.fromkeys(reasons))
            parts.append(f"throttled by {reason} in {share} of the samples{clocks}")
        return "; ".join(parts)


class WorkerBook:
    """Collect the events of epochs and workers."""

    def __init__(self) -> None:
        self._ends: dict[float, dict[int, tuple[int, float]]] = {}
        self._workers: dict[int, WorkerUse] = {}
        self._pace: tuple[int, float] = (0, 0.0)  # steps, and seconds of a step

    def take(self, event: Event) -> None:
        match event.kind:
            case EventKind.RESTARTED:
                self._workers = {}
            case EventKind.PACE if event.rank == 0:
                self._compare(event)
            case EventKind.EPOCH if event.rank is not None:
                self._epoch(event.rank, event)
            case EventKind.DEVICE if event.rank is not None:
                worker = self._of(event.rank)
                self._workers[event.rank] = replace(
                    worker,
                    pod=event.text("pod"),
                    threads=event.whole("threads"),
                    cores=event.text("cores"),
                    backend=event.text("backend"),
                )
            case EventKind.MEMORY if event.rank is not None:
                worker = self._of(event.rank)
                rss_gib = as_float(event.data.get("peak_rss_gib"))
                cuda_gib = as_float(event.data.get("cuda_reserved_gib"))
                self._workers[event.rank] = replace(
                    worker,
                    peak_rss_gib=_most(worker.peak_rss_gib, rss_gib),
                    peak_cuda_gib=_most(worker.peak_cuda_gib, cuda_gib),
                )

    def _of(self, rank: int) -> WorkerUse:
        return self._workers.get(rank, WorkerUse(rank=rank))

    def _epoch(self, rank: int, event: Event) -> None:
        # A rank may print any number, so only finite numbers count.
        epoch = as_float(event.data.get("epoch"))
        seconds = as_float(event.data.get("seconds"))
        steps = event.whole("steps")
        if epoch is None or seconds is None or not steps:
            return
        ranks = self._ends.setdefault(epoch, {})
        ranks[rank] = steps, seconds
        worker = self._of(rank)
        total_s = as_float(event.data.get("total_s"))
        self._workers[rank] = replace(worker, seconds=total_s)

    def _compare(self, event: Event) -> None:
        self._pace = event.whole("steps") or 0, event.number("step_s") or 0.0
        for rank, own_s in enumerate(as_list(event.data.get("own_s"))):
            # Every rank has reported its device before its first step.
            if rank in self._workers:
                self._workers[rank] = replace(self._workers[rank], own_s=as_float(own_s))

    @property
    def slow_rank(self) -> str:
        """Sentence on the slowest rank, if it holds the other ranks up. Empty: no rank does."""
        steps, step_s = self._pace
        known = [(worker.own_s, worker) for worker in self.workers if worker.own_s is not None]
        if not known:
            return ""
        usual_s = median(own_s for own_s, _ in known)
        own_s, worker = max(known, key=lambda pair: pair[0])
        if own_s < _SLOW * usual_s or own_s - usual_s < _SLOW_SHARE * step_s or not usual_s:
            return ""
        pod = f" on {worker.pod}" if worker.pod else ""
        return (
            f"rank {worker.rank}{pod} takes {number(own_s / usual_s)} times the median of the ranks"
            f" for its own work: {duration(own_s)} in a step of {duration(step_s)}, over the last"
            f" {count(steps)} compared steps"
        )

    @property
    def epochs(self) -> Sequence[EpochTime]:
        epochs = []
        for epoch, ranks in sorted(self._ends.items()):
            steps, _ = next(iter(ranks.values()))
            slowest_s = max(seconds for _, seconds in ranks.values())
            passed = EpochTime(epoch=epoch, steps=steps, seconds=slowest_s)
            epochs.append(passed)
        return epochs

    @property
    def workers(self) -> Sequence[WorkerUse]:
        return [self._workers[rank] for rank in sorted(self._workers)]


class GpuBook:
    """Sum up the samples of every GPU over the whole run."""

    def __init__(self, uses: Iterable[GpuUse] = ()) -> None:
        self._gpus = {(use.pod, use.index): use for use in uses}

    def take(self, pod: str, raw: Mapping[str, object]) -> None:
        """Add a look at a GPU: index, percent, used_gib, total_gib, and what is not as usual."""
        index = as_int(raw.get("index"))
        if index is None:
            return
        gpu = self._gpus.get((pod, index))
        if gpu is None:
            gpu = GpuUse(pod=pod, index=index)
        looks = gpu.looks
        busy = as_float(raw.get("percent"))
        mean = gpu.percent
        if busy is not None:
            sum_before = (mean or 0.0) * looks
            looks = looks + 1
            mean = (sum_before + busy) / looks
        used_gib = as_float(raw.get("used_gib"))
        reasons = (as_int(raw.get("throttle")) or 0) & THROTTLED
        clocks = [each for each in (gpu.least_mhz, as_float(raw.get("sm_mhz"))) if each is not None]
        self._gpus[pod, index] = replace(
            gpu,
            peak_gib=_most(gpu.peak_gib, used_gib),
            total_gib=as_float(raw.get("total_gib")),
            percent=mean,
            looks=looks,
            ecc_errors=as_int(raw.get("ecc_errors")) or gpu.ecc_errors,
            throttled_looks=gpu.throttled_looks + bool(reasons),
            throttle=gpu.throttle | reasons,
            least_mhz=min(clocks, default=None),
            most_mhz=_most(gpu.most_mhz, as_float(raw.get("most_mhz"))),
        )

    @property
    def uses(self) -> Sequence[GpuUse]:
        return [self._gpus[place] for place in sorted(self._gpus)]


def _most(before: float | None, now: float | None) -> float | None:
    if before is None:
        return now
    if now is None:
        return before
    return max(before, now)
