"""Keep the curves of a run and of its pods' memory, and write TensorBoard event files."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from workbench.base.json_values import number, parts
from workbench.rundir.events import Event, EventKind
from workbench.rundir.metrics import numbers_in, tag_of


class Curve:
    """Growing list of (x, value, time) with 24 bytes per point.

    Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self._x = array("d")
        self._y = array("d")
        self._time_s = array("d")

    def add(self, x: float | None, value: float | None, time_s: float = math.nan) -> None:
        if x is not None and value is not None and math.isfinite(value):
            self._x.append(x)
            self._y.append(value)
            self._time_s.append(time_s)

    def cut(self, x: float) -> None:
        """Remove the last points beyond x, after a run went back to an earlier step."""
        while self._x and self._x[-1] > x:
            for values in (self._x, self._y, self._time_s):
                values.pop()

    @property
    def last(self) -> float | None:
        return self._y[-1] if self._y else None

    @property
    def highest(self) -> float | None:
        return max(self._y, default=None)

    @property
    def last_time_s(self) -> float:
        """Time of the newest value in seconds since 1970. NaN: unknown."""
        return self._time_s[-1] if self._time_s else math.nan

    def thinned(self, limit: int = 400) -> tuple[list[float], list[float], list[float]]:
        """Return x, values and times of at most `limit` points.

        A skipped stretch keeps its lowest and highest value.

        Example:
            >>> curve = Curve()
            >>> for step in range(1000):
            ...     curve.add(step, 50.0 if step == 577 else 1.0, 2.0 * step)
            >>> x, values, times = curve.thinned(100)
            >>> len(x) <= 100, max(values), x[0], x[-1], times[-1]
            (True, 50.0, 0.0, 999.0, 1998.0)
        """
        size = len(self._x)
        order: range | list[int] = range(size)
        if size > limit:
            stretches = (limit - 2) // 2
            picked = {0, size - 1}
            for number in range(stretches):
                part = range(number * size // stretches, (number + 1) * size // stretches)
                picked |= {min(part, key=self._y.__getitem__), max(part, key=self._y.__getitem__)}
            order = sorted(picked)
        return (
            [self._x[i] for i in order],
            [self._y[i] for i in order],
            [self._time_s[i] for i in order],
        )

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(zip(self._x, self._y, strict=True))


class _Source(IntEnum):
    NOBODY = 0
    RANKS = 1
    """Resident memory, reported by ranks at evaluations."""
    SAMPLES = 2
    """Resident memory, sampled by the agent every few seconds."""
    CUDA = 3
    """Reserved GPU memory, reported by ranks at evaluations."""
    GPUS = 4
    """Used memory of the pod's GPUs, read from the driver every few seconds."""


@dataclass(slots=True)
class HostMemory:
    """Memory of a pod. A better source replaces the points of a lesser source."""

    gib: Curve = field(default_factory=Curve)
    """Points of (seconds since 1970, GiB), the sum over the pod's ranks."""
    peak_gib: float | None = None
    """Sum of the ranks' own peaks in GiB."""
    gpu_percent: float | None = None
    """Mean load of the pod's GPUs now, 0 to 100. None: no GPU."""
    source: int = _Source.NOBODY

    def add(self, source: int, time_s: float, gib: float | None) -> None:
        """Append a point, unless a better source has reported before."""
        if source > self.source:
            self.source = source
            self.gib = Curve()
        if source == self.source:
            self.gib.add(time_s, gib)


class MemoryBook:
    def __init__(self, place: Callable[[int], tuple[str, int]]):
        self.hosts: dict[str, HostMemory] = {}
        """Memory by the pod's address."""
        self._place = place
        self._ranks: dict[str, dict[int, tuple[float, float]]] = {}

    @property
    def kind(self) -> str:
        return (
            "cuda"
            if any(host.source >= _Source.CUDA for host in self.hosts.values())
            else "resident"
        )

    def take(self, event: Event) -> None:
        if event.kind == EventKind.SAMPLE:
            self._sample(event)
        elif event.kind == EventKind.MEMORY and event.rank is not None:
            self._rank(event.rank, event)

    def _rank(self, rank: int, event: Event) -> None:
        reserved = event.number("cuda_reserved_gib")
        resident = event.number("rss_gib")
        source, now = (_Source.RANKS, resident) if reserved is None else (_Source.CUDA, reserved)
        peak = event.number("peak_rss_gib") if source is _Source.RANKS else None
        if now is None:
            return
        peak = now if peak is None else peak
        address, count = self._place(rank)
        ranks = self._ranks.setdefault(address, {})
        ranks[rank] = (now, max(peak, ranks[rank][1]) if rank in ranks else peak)
        if len(ranks) == count:  # a sum over only some of the ranks would look like a jump
            host = self.hosts.setdefault(address, HostMemory())
            host.add(source, event.time_s, sum(now for now, _ in ranks.values()))
            host.peak_gib = sum(peak for _, peak in ranks.values())

    def _sample(self, event: Event) -> None:
        host = self.hosts.setdefault(event.text("host"), HostMemory())
        host.add(_Source.SAMPLES, event.time_s, event.number("rss_gib"))
        gpus = parts(event.data.get("gpus"))
        if gpus:
            host.add(
                _Source.GPUS, event.time_s, sum(number(gpu.get("used_gib")) or 0.0 for gpu in gpus)
            )
        busy = [percent for gpu in gpus if (percent := number(gpu.get("percent"))) is not None]
        host.gpu_percent = sum(busy) / len(busy) if busy else None


def scalars_of(event: Event) -> Mapping[str, float]:
    """Return the numbers of an event that TensorBoard shows, by tag.

    Example:
        >>> figures = {"eval_loss": 2.5, "metrics": {"rouge1": 0.5}}
        >>> scalars_of(Event(time_s=0, rank=0, kind="eval", data=figures))
        {'eval/rouge1': 0.5, 'eval/loss': 2.5}
    """
    if event.kind == EventKind.MEMORY:
        memory_gib = event.number("cuda_allocated_gib") or event.number("rss_gib")
        return {} if memory_gib is None else {f"memory/rank-{event.rank}_gib": memory_gib}
    return {tag_of(name, event.kind): value for name, value in numbers_in(event).items()}


class ScalarWriter:
    """Append scalars to an event file; close the writer to flush."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def add(self, event: Event) -> None:
        """Write the scalars of an event at its step; skip events without a step or numbers."""
        scalars = scalars_of(event)
        step = event.whole("step")
        if not (scalars or event.kind == EventKind.RESTARTED) or step is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(self._folder), flush_secs=2)
        if event.kind == EventKind.RESTARTED:  # TensorBoard then drops the points of later steps
            begin = SessionLog(status=SessionLog.SessionStatus.START)
            self._writer.add_event(
                TensorBoardEvent(wall_time=event.time_s, step=step + 1, session_log=begin)
            )
            return
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(
            TensorBoardEvent(wall_time=event.time_s, step=step, summary=Summary(value=values))
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
