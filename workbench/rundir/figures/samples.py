"""Record samples of the pods' memory in a file of bounded size, and read the file.

The first line has the number of the file's generation, and the GPUs over the whole run. Every
further line is a look at a pod, or the lowest, median and highest value of several looks. A full
file is replaced by a smaller one of the next generation, in which looks are joined.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

from workbench.base.files import records, write_bytes
from workbench.base.files.records import try_read
from workbench.base.json_values import Json, as_float, as_int, as_list, as_objects, as_str
from workbench.rundir.events import records_in
from workbench.rundir.figures.workers import GpuBook, GpuUse
from workbench.rundir.paths import RunPaths

_MOST_BYTES = 2 << 20
# The median of three medians is hardly moved by single extremes.
_JOINED = 3
# Pause after a failed write: the whole file is written then.
_PAUSE_S = 30.0


class Spread(NamedTuple):
    """Values of several looks in GiB."""

    lowest: float
    median: float
    highest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Memory of a pod at a look, or at several looks of its agent."""

    time_s: float
    """Time of the first look in seconds since 1970."""
    until_s: float
    """Time of the last look."""
    pod: str
    host: str
    """Address of the pod."""
    looks: int = 1
    rss_gib: Spread | None = None
    """Resident memory of the pod's ranks."""
    gpu_gib: Spread | None = None
    """Used memory of all GPUs of the pod. None: no GPU."""
    gpu_percent: float | None = None
    """Mean load of the pod's GPUs, 0 to 100."""
    cpu_cores: float | None = None
    """CPU cores in use by the pod's ranks since the look before. None: unknown."""
    gpus: tuple[Json, ...] = ()
    """GPUs of a look: index, percent, used_gib, total_gib. Empty: the first line has them."""

    @classmethod
    def of_look(
        cls,
        time_s: float,
        *,
        pod: str,
        host: str,
        rss_gib: float,
        gpus: Sequence[Json],
        cpu_cores: float | None = None,
    ) -> Self:
        used_gib = round(sum(as_float(gpu.get("used_gib")) or 0.0 for gpu in gpus), 4)
        loads = [load for gpu in gpus if (load := as_float(gpu.get("percent"))) is not None]
        return cls(
            time_s=round(time_s, 3),
            until_s=round(time_s, 3),
            pod=pod,
            host=host,
            rss_gib=Spread(rss_gib, rss_gib, rss_gib),
            gpu_gib=Spread(used_gib, used_gib, used_gib) if gpus else None,
            gpu_percent=round(sum(loads) / len(loads), 4) if loads else None,
            cpu_cores=cpu_cores,
            gpus=tuple(gpus),
        )

    @classmethod
    def read(cls, raw: object) -> Self | None:
        """Read a line. None: no sample. A value of a wrong type counts as missing."""
        if not isinstance(raw, Mapping):
            return None
        time_s = as_float(raw.get("time_s"))
        if time_s is None:
            return None
        until_s = as_float(raw.get("until_s"))
        return cls(
            time_s=time_s,
            until_s=time_s if until_s is None else until_s,
            pod=as_str(raw.get("pod")),
            host=as_str(raw.get("host")),
            looks=max(1, as_int(raw.get("looks")) or 1),
            rss_gib=_spread_of(raw.get("rss_gib")),
            gpu_gib=_spread_of(raw.get("gpu_gib")),
            gpu_percent=as_float(raw.get("gpu_percent")),
            cpu_cores=as_float(raw.get("cpu_cores")),
            gpus=tuple(as_objects(raw.get("gpus"))),
        )

    def to_line(self) -> bytes:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        known = {name: value for name, value in values.items() if value not in (None, ())}
        return json.dumps(known).encode() + b"\n"


def _spread_of(value: object) -> Spread | None:
    values = [as_float(each) for each in as_list(value)]
    known = [each for each in values if each is not None]
    return Spread(*known) if len(values) == len(known) == 3 else None


def joined(samples: Sequence[Sample]) -> Sample:
    """Join samples of a pod, in order of time.

    The median is that of all looks if every sample is a look, and else the median of the samples'
    medians, each as often as its looks.

    Example:
        >>> looks = [
        ...     Sample.of_look(n, pod="pod-0", host="a", rss_gib=gib, gpus=())
        ...     for n, gib in enumerate((1.0, 9.0, 2.0))
        ... ]
        >>> joined(looks).rss_gib
        Spread(lowest=1.0, median=2.0, highest=9.0)
    """
    loads = [(one.gpu_percent, one.looks) for one in samples if one.gpu_percent is not None]
    looks = sum(count for _, count in loads)
    total = sum(load * count for load, count in loads)
    return replace(
        samples[0],
        until_s=samples[-1].until_s,
        looks=sum(one.looks for one in samples),
        rss_gib=_joined([(one.rss_gib, one.looks) for one in samples]),
        gpu_gib=_joined([(one.gpu_gib, one.looks) for one in samples]),
        gpu_percent=round(total / looks, 4) if looks else None,
        cpu_cores=None,
        gpus=(),
    )


def _joined(spreads: Sequence[tuple[Spread | None, int]]) -> Spread | None:
    known = [(spread, looks) for spread, looks in spreads if spread is not None]
    if not known:
        return None
    return Spread(
        min(spread.lowest for spread, _ in known),
        _weighted_median([(spread.median, looks) for spread, looks in known]),
        max(spread.highest for spread, _ in known),
    )


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """Return the median of values, each with its number of looks."""
    ordered = sorted(values)
    passed = list(accumulate(looks for _, looks in ordered))
    half = passed[-1] / 2
    lower, _ = ordered[bisect_left(passed, half)]
    upper, _ = ordered[bisect_right(passed, half)]
    return round((lower + upper) / 2, 4)


def thinned(samples: Sequence[Sample], looks: int) -> list[Sample]:
    """Join the samples of every pod until each has `looks` looks. The newest look stays alone."""
    of_pod: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        of_pod.setdefault((sample.pod, sample.host), []).append(sample)
    found: list[Sample] = []
    for own in of_pod.values():
        *earlier, newest = own
        group: list[Sample] = []
        count = 0
        for sample in earlier:
            group.append(sample)
            count += sample.looks
            if count >= looks:
                found.append(joined(group))
                group = []
                count = 0
        if group:
            found.append(joined(group))
        found.append(newest)
    return sorted(found, key=lambda sample: sample.time_s)


class SampleFile:
    """The samples of a run in memory and in their file. Only the keeper writes."""

    def __init__(self, paths: RunPaths, most_bytes: int = _MOST_BYTES):
        """Begin without samples. The file has at most `most_bytes`, or two lines for each pod."""
        self.gpus = GpuBook()
        self._paths = paths
        self._most = self._limit = most_bytes
        self._samples: list[Sample] = []
        self._generation = 0
        self._size: int | None = None  # None: the file has to be replaced
        self._pause_until_s = 0.0

    @property
    def highest_gib(self) -> Mapping[str, float]:
        """Highest resident memory by host."""
        highest: dict[str, float] = {}
        for sample in self._samples:
            if sample.rss_gib is not None:
                before = highest.get(sample.host, 0.0)
                highest[sample.host] = max(before, sample.rss_gib.highest)
        return highest

    def recover(self) -> None:
        """Continue with the file of a dead keeper. The next sample replaces the file."""
        tail = SampleTail(self._paths.samples)
        self._samples, _ = tail.read()
        self.gpus = tail.gpus
        self._generation = tail.generation
        self._size = None

    def add(self, sample: Sample) -> None:
        """Add a sample. Raise OSError if the file cannot be written; a later call repeats that."""
        self._samples.append(sample)
        for gpu in sample.gpus:
            self.gpus.take(sample.pod, gpu)
        if sample.time_s < self._pause_until_s:
            return
        try:
            self._write(sample.to_line())
        except OSError:
            self._pause_until_s = sample.time_s + _PAUSE_S
            raise

    def complete(self) -> None:
        """Write the samples that are not in the file. Raise OSError on failure."""
        if self._samples and self._size is None:
            self._replace()

    def _write(self, line: bytes) -> None:
        if self._size is None or self._size + len(line) > self._limit:
            self._replace()
            return
        size = self._size + len(line)
        self._size = None  # a failed write may leave a part of the line
        with records.open_to_append(self._paths.samples) as out:
            records.write_all(out, line)
        self._size = size

    def _replace(self) -> None:
        """Replace the file. Samples are joined until they fill at most half of the room."""
        self._size = None
        self._generation += 1
        self._samples = [replace(sample, gpus=()) for sample in self._samples]
        data = self._data()
        before = self._samples
        most_looks = sum(sample.looks for sample in before)
        looks = 1
        while len(data) > self._most // 2 and looks < most_looks:
            looks *= _JOINED
            self._samples = thinned(before, looks)
            data = self._data()
        write_bytes(self._paths.samples, data)
        self._size = len(data)
        self._limit = max(self._most, 2 * len(data))

    def _data(self) -> bytes:
        gpus = [asdict(gpu) for gpu in self.gpus.uses]
        head = json.dumps({"generation": self._generation, "gpus": gpus})
        return b"".join([head.encode() + b"\n", *(sample.to_line() for sample in self._samples)])


class SampleTail:
    """Read a file of samples from the end of the previous read, and a new generation as a whole."""

    def __init__(self, path: Path):
        self.gpus = GpuBook()
        """Memory and load of every GPU so far."""
        self.generation = 0
        self.last_s: float | None = None
        """Time of the last look in seconds since 1970. None: no sample."""
        self._path = path
        self._head = b""
        self._offset = 0

    def read(self) -> tuple[list[Sample], bool]:
        """Return new samples, and whether they take the place of all samples before.

        Broken and unfinished lines are skipped. A file that is missing, or too large for a record,
        has no new samples.
        """
        data = try_read(self._path) or b""
        end = data.rfind(b"\n") + 1
        if not end:
            return [], False
        head = data[: data.index(b"\n") + 1]
        anew = head != self._head or end < self._offset
        if anew:
            self._begin(head)
        lines = data[self._offset : end].split(b"\n")
        self._offset = end
        samples = [sample for raw in records_in(lines) if (sample := Sample.read(raw))]
        for sample in samples:
            self.last_s = max(self.last_s or sample.until_s, sample.until_s)
            for gpu in sample.gpus:
                self.gpus.take(sample.pod, gpu)
        return samples, anew

    def _begin(self, head: bytes) -> None:
        """Begin a generation with its first line."""
        self._head = head
        self._offset = len(head)
        raw = next(iter(records_in([head])), None)
        facts = raw if isinstance(raw, Mapping) else {}
        self.generation = as_int(facts.get("generation")) or 0
        self.gpus = GpuBook(filter(None, map(_gpu_of, as_objects(facts.get("gpus")))))


def _gpu_of(raw: Json) -> GpuUse | None:
    index = as_int(raw.get("index"))
    if index is None:
        return None
    return GpuUse(
        pod=as_str(raw.get("pod")),
        index=index,
        peak_gib=as_float(raw.get("peak_gib")),
        total_gib=as_float(raw.get("total_gib")),
        percent=as_float(raw.get("percent")),
        looks=max(0, as_int(raw.get("looks")) or 0),
        ecc_errors=as_int(raw.get("ecc_errors")),
        throttled_looks=max(0, as_int(raw.get("throttled_looks")) or 0),
        throttle=as_int(raw.get("throttle")) or 0,
        least_mhz=as_float(raw.get("least_mhz")),
        most_mhz=as_float(raw.get("most_mhz")),
    )
