"""The memory of each pod of a run over time; what a better source reports replaces what lesser ones did. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from workbench.base.json_values import number, parts
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.curve import Curve


class _Source(IntEnum):
    NOBODY = 0
    RANKS = 1
    """Ranks, of their resident memory, at evaluations."""
    SAMPLES = 2
    """The agent, of the same, every few seconds."""
    CUDA = 3
    """Ranks, of what they have reserved on GPUs, at evaluations."""
    GPUS = 4
    """The driver, of what is used on the pod's GPUs, every few seconds."""


@dataclass(slots=True)
class HostMemory:
    gib: Curve = field(default_factory=Curve)
    """(seconds since 1970, GiB), all its ranks together."""
    peak_gib: float | None = None
    """The most that its ranks reported, each at its own peak, together."""
    gpu_percent: float | None = None
    """How busy its GPUs are now, 0 to 100, on average; None where it has none."""
    source: int = _Source.NOBODY

    def add(self, source: int, time_s: float, gib: float | None) -> None:
        """Append a point, unless a better source has told already."""
        if source > self.source:
            self.source, self.gib = source, Curve()
        if source == self.source:
            self.gib.add(time_s, gib)


class MemoryBook:
    def __init__(self, place: Callable[[int], tuple[str, int]]):
        self.hosts: dict[str, HostMemory] = {}
        """By the pod's address."""
        self._place = place
        self._ranks: dict[str, dict[int, tuple[float, float]]] = {}

    @property
    def kind(self) -> str:
        return "cuda" if any(host.source >= _Source.CUDA for host in self.hosts.values()) else "resident"

    def take(self, event: Event) -> None:
        if event.kind == EventKind.SAMPLE:
            self._sample(event)
        elif event.kind == EventKind.MEMORY and event.rank is not None:
            self._rank(event.rank, event)

    def _rank(self, rank: int, event: Event) -> None:
        reserved, resident = event.number("cuda_reserved_gib"), event.number("rss_gib")
        source, now = (_Source.RANKS, resident) if reserved is None else (_Source.CUDA, reserved)
        peak = event.number("peak_rss_gib") if source is _Source.RANKS else None
        if now is None:
            return
        peak = now if peak is None else peak
        address, count = self._place(rank)
        ranks = self._ranks.setdefault(address, {})
        ranks[rank] = (now, max(peak, ranks[rank][1]) if rank in ranks else peak)
        if len(ranks) == count:  # a sum over some of its ranks only would look like a jump
            host = self.hosts.setdefault(address, HostMemory())
            host.add(source, event.time_s, sum(now for now, _ in ranks.values()))
            host.peak_gib = sum(peak for _, peak in ranks.values())

    def _sample(self, event: Event) -> None:
        host = self.hosts.setdefault(event.text("host"), HostMemory())
        host.add(_Source.SAMPLES, event.time_s, event.number("rss_gib"))
        gpus = parts(event.data.get("gpus"))
        if gpus:
            host.add(_Source.GPUS, event.time_s, sum(number(gpu.get("used_gib")) or 0.0 for gpu in gpus))
        busy = [percent for gpu in gpus if (percent := number(gpu.get("percent"))) is not None]
        host.gpu_percent = sum(busy) / len(busy) if busy else None
