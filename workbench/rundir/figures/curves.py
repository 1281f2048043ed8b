"""Keep the curves of a run and of its pods' memory, and write TensorBoard event files."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from workbench.base.files.gate import library
from workbench.rundir.events import Event, EventKind
from workbench.rundir.figures.metrics import numbers_in, tag_of
from workbench.rundir.figures.samples import Sample, Spread
from workbench.rundir.figures.trainings import begins_again

_MOST_EARLIER = 19  # lines of trainings, so that memory stays bounded
EVERYWHERE = (-math.inf, math.inf)
"""The range of all x."""
MOST_SHOWN = 400
"""Points of a line in a plot."""


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return TensorBoard's exponential moving average, without a bias towards zero at the start.

    Example:
        >>> [round(value, 3) for value in smoothed([4.0, 4.0, 1.0], 0.5)]
        [4.0, 4.0, 2.286]
    """
    means = []
    last = 0.0
    for place, value in enumerate(values, 1):
        last = last * weight + (1 - weight) * value
        means.append(last / (1 - weight**place))
    return means


class Curve:
    """Growing list of (x, value, time) with 24 bytes per point.

    Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self._x = array("d")
        self._y = array("d")
        self._time_s = array("d")
        self.earlier: list[Curve] = []
        """Lines of the trainings before the last one, at most 19."""
        self.begun = 1
        """Number of the last training, counted from 1."""
        self._training = 0
        self._repeats = False

    def add(
        self,
        x: float | None,
        value: float | None,
        time_s: float = math.nan,
        *,
        late: bool = False,
    ) -> None:
        """Append a point. A late point is put in its place among the points by x."""
        if x is None or value is None:
            return
        if not math.isfinite(value):
            return
        if late:
            place = bisect_right(self._x, x)
            self._x.insert(place, x)
            self._y.insert(place, value)
            self._time_s.insert(place, time_s)
            return
        self._x.append(x)
        self._y.append(value)
        self._time_s.append(time_s)

    def follow(
        self, x: float | None, value: float | None, time_s: float, *, late: bool, training: int = 0
    ) -> None:
        """Add a point of a training.

        A training that begins again begins a new line, and `earlier` keeps the line before. A
        report of an earlier x is put in its place, so a line never runs back.

        Args:
            x: Optimizer step.
            value: Value of the point.
            time_s: Time in seconds since 1970.
            late: Whether the point belongs among the points before.
            training: Number of trainings that ended before, for figures that every training
                reports at other steps. 0: only x tells.

        Example:
            >>> curve = Curve()
            >>> for step in (1, 2, 4, 3, 1, 2):
            ...     curve.follow(step, 10.0 * step, 0.0, late=False)
            >>> [list(line) for line in (*curve.earlier, curve)]
            [[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (4.0, 40.0)], [(1.0, 10.0), (2.0, 20.0)]]
        """
        if x is None or value is None or not math.isfinite(value):
            return
        is_behind = len(self) > 0 and x < self._x[-1]
        if not late and len(self) > 0:
            if begins_again(x, first=self._x[0], last=self._x[-1]):
                self._begin(max(training, self._training + 1))
                is_behind = False
            elif training > self._training:
                self._begin(training)
                is_behind = False
        self.add(x, value, time_s, late=late or is_behind)

    def repeat(self) -> None:
        """Take the next points for a repetition of the trainings so far, after a restart."""
        self.earlier.clear()
        self.begun = 1
        self._repeats = True

    def _begin(self, training: int) -> None:
        """Begin the line of another training."""
        self._training = training
        if not self._repeats:
            before = Curve()
            before._x, before._y, before._time_s = self._x, self._y, self._time_s
            self.earlier = [*self.earlier, before][-_MOST_EARLIER:]
            self.begun += 1
        self._repeats = False
        self._x, self._y, self._time_s = array("d"), array("d"), array("d")

    def cut(self, x: float) -> None:
        """Remove the last points beyond x, after a run went back to an earlier step."""
        while self._x and self._x[-1] > x:
            self._x.pop()
            self._y.pop()
            self._time_s.pop()

    @property
    def last(self) -> float | None:
        if not self._y:
            return None
        return self._y[-1]

    @property
    def highest(self) -> float | None:
        return max(self._y, default=None)

    @property
    def last_time_s(self) -> float:
        """Time of the newest value in seconds since 1970. NaN: unknown."""
        if not self._time_s:
            return math.nan
        return self._time_s[-1]

    def thinned(
        self,
        limit: int = MOST_SHOWN,
        within: tuple[float, float] = EVERYWHERE,
    ) -> tuple[list[float], list[float], list[float]]:
        """Return x, values and times of at most `limit` points, whose x is `within` a range.

        A skipped stretch keeps its lowest and highest value.

        Example:
            >>> curve = Curve()
            >>> for step in range(1000):
            ...     curve.add(step, 50.0 if step == 577 else 1.0, 2.0 * step)
            >>> x, values, times = curve.thinned(100)
            >>> len(x) <= 100, max(values), x[0], x[-1], times[-1]
            (True, 50.0, 0.0, 999.0, 1998.0)
        """
        order = self.places(limit, within)
        x = [self._x[place] for place in order]
        values = [self._y[place] for place in order]
        times = [self._time_s[place] for place in order]
        return x, values, times

    def smoothed(
        self,
        weight: float,
        limit: int = MOST_SHOWN,
        within: tuple[float, float] = EVERYWHERE,
    ) -> list[float]:
        """Return the smoothed values at the points of `thinned`.

        All values of the curve are smoothed, before points are skipped.
        """
        values = smoothed(self._y, weight)
        return [values[place] for place in self.places(limit, within)]

    def places(
        self, limit: int = MOST_SHOWN, within: tuple[float, float] = EVERYWHERE
    ) -> Sequence[int]:
        """Return the places of at most `limit` points that show the curve.

        Every stretch of x has its lowest and its highest point. Stretches begin at multiples of a
        power of two, so the same points are chosen among points that were chosen with a higher
        limit before.
        """
        first, last = within
        begin = bisect_left(self._x, first)
        end = bisect_right(self._x, last)
        if end - begin <= limit:
            return range(begin, end)
        picked = {begin, end - 1}
        # The first and the last stretch may be narrower than the others.
        span = self._x[end - 1] - self._x[begin]
        _, exponent = math.frexp(span / (limit // 2 - 3))
        width = math.ldexp(1.0, exponent)
        while begin < end:
            next_x = (math.floor(self._x[begin] / width) + 1) * width
            after = bisect_left(self._x, next_x, begin + 1, end)
            stretch = range(begin, after)
            picked.add(min(stretch, key=self._y.__getitem__))
            picked.add(max(stretch, key=self._y.__getitem__))
            begin = after
        return sorted(picked)

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
    cpu_cores: float | None = None
    """CPU cores in use by the pod's ranks now. None: unknown."""
    source: int = _Source.NOBODY

    def add(self, source: int, time_s: float, gib: float | None) -> None:
        """Append a point, unless a better source has reported before."""
        if source > self.source:
            self.source = source
            self.gib = Curve()
        if source == self.source:
            self.gib.add(time_s, gib)

    def add_spread(self, source: int, sample: Sample, gib: Spread | None) -> None:
        """Append a look, or the lowest, median and highest value of several looks."""
        if gib is None or sample.looks == 1:
            self.add(source, sample.until_s, None if gib is None else gib.median)
            return
        middle_s = (sample.time_s + sample.until_s) / 2
        times = (sample.time_s, middle_s, sample.until_s)
        for time_s, value in zip(times, gib, strict=True):
            self.add(source, time_s, value)


class MemoryBook:
    def __init__(self) -> None:
        self.hosts: dict[str, HostMemory] = {}
        """Memory by the pod's address."""
        self._ranks: dict[str, dict[int, tuple[float, float]]] = {}

    @property
    def kind(self) -> str:
        for host in self.hosts.values():
            if host.source >= _Source.CUDA:
                return "cuda"
        return "resident"

    def take_samples(self, samples: Iterable[Sample], *, anew: bool) -> None:
        """Add samples. `anew`: the samples take the place of all samples before."""
        if anew:
            for host in self.hosts.values():
                if host.source in (_Source.SAMPLES, _Source.GPUS):
                    host.gib = Curve()
        for sample in samples:
            host = self.hosts.setdefault(sample.host, HostMemory())
            host.add_spread(_Source.SAMPLES, sample, sample.rss_gib)
            if sample.gpu_gib is not None:
                host.add_spread(_Source.GPUS, sample, sample.gpu_gib)
            host.gpu_percent = sample.gpu_percent
            host.cpu_cores = sample.cpu_cores

    def take(self, rank: int, event: Event, address: str, count: int) -> None:
        """Add the memory of a rank, whose pod has the address and `count` ranks."""
        source = _Source.CUDA
        now = event.number("cuda_reserved_gib")
        peak = now
        if now is None:
            source = _Source.RANKS
            now = event.number("rss_gib")
            peak = event.number("peak_rss_gib")
        if now is None:
            return
        if peak is None:
            peak = now
        ranks = self._ranks.setdefault(address, {})
        if rank in ranks:
            _, peak_before = ranks[rank]
            peak = max(peak, peak_before)
        ranks[rank] = (now, peak)
        # A sum over only some of the ranks would look like a jump.
        if len(ranks) == count:
            host = self.hosts.setdefault(address, HostMemory())
            now_gib = sum(now for now, _ in ranks.values())
            host.add(source, event.time_s, now_gib)
            host.peak_gib = sum(peak for _, peak in ranks.values())


def scalars_of(event: Event) -> Mapping[str, float]:
    """Return the numbers of an event that TensorBoard shows, by tag.

    Example:
        >>> figures = {"eval_loss": 2.5, "metrics": {"rouge1": 0.5}}
        >>> scalars_of(Event(time_s=0, rank=0, kind="eval", data=figures))
        {'eval/rouge1': 0.5, 'eval/loss': 2.5}
    """
    if event.kind == EventKind.MEMORY:
        memory_gib = event.number("cuda_allocated_gib") or event.number("rss_gib")
        if memory_gib is None:
            return {}
        return {f"memory/rank-{event.rank}_gib": memory_gib}
    scalars = {}
    for name, value in numbers_in(event).items():
        tag = tag_of(name, event.kind)
        scalars[tag] = value
    return scalars


class ScalarWriter:
    """Append scalars to an event file of TensorBoard; close the writer to flush."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def add(self, event: Event) -> None:
        """Write the scalars of an event at its step; skip events without a step or numbers."""
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        step = event.whole("step")
        if event.kind == EventKind.RESTARTED:
            # TensorBoard drops the points of later steps at the start of a session.
            begin = SessionLog(status=SessionLog.SessionStatus.START)
            step = 0 if step is None else step + 1
            written = TensorBoardEvent(wall_time=event.time_s, step=step, session_log=begin)
        else:
            values = scalars_of(event)
            if step is None or not values:
                return
            scalars = [Summary.Value(tag=tag, simple_value=each) for tag, each in values.items()]
            summary = Summary(value=scalars)
            written = TensorBoardEvent(wall_time=event.time_s, step=step, summary=summary)
        self._open().add_event(written)

    def _open(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(library(self._folder), flush_secs=2)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
