"""The columns of a benchmark's table; each picks unit and decimals once, for all rows, so that the eye can compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.json_values import number
from workbench.base.words import UNKNOWN
from workbench.benchmark.row import BenchmarkRow

_MOST_DECIMALS = 5
_BINARY = 1024.0
_TIMES = (("s", 1.0, 600.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, math.inf))
_BYTES = (("kB", 1e3, 1e6), ("MB", 1e6, 1e10), ("GB", 1e9, math.inf))
_MEMORY = (("MiB", 1 / _BINARY, 0.1), ("GiB", 1.0, math.inf))
_FLOPS = (("GFLOPS", 1e-3, 0.1), ("TFLOPS", 1.0, math.inf))

Scale = tuple[str, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    scales: Sequence[Scale] = (("", 1.0, math.inf),)
    """Unit, its size, and the largest figure below which it is taken; the last takes all."""
    digits: int = 3
    """Significant digits of the largest figure."""
    decimals: int | None = None
    """Digits behind the point, where these do not depend on the figures."""


_COUNT = Kind(decimals=0)
_PLAIN = Kind(digits=4)
_TIME = Kind(scales=_TIMES, digits=4)
_GIB = Kind(scales=_MEMORY)
_SHARE = Kind(scales=(("%", 0.01, math.inf),), decimals=1)
_RATE = Kind(digits=4)
_MOST, _LEAST = 1, -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    field: str
    title: str
    """What stands above it, beneath its section's title."""
    section: str
    kind: Kind = _PLAIN
    unit: str = ""
    """The unit where the kind has none."""
    best: int = 0
    """1 where the largest figure is the best, -1 where the smallest is, 0 where none is better than another."""

    @property
    def name(self) -> str:
        """What it is called on its own, out of its section."""
        return _ALONE.get(self.field, self.title)

    def value(self, row: BenchmarkRow) -> float | None:
        """Return a row's figure; None where it was not measured, or cannot be written."""
        return number(getattr(row, self.field))


MEMORY = "peak memory of a pod"
"""The section whose titles say little on their own."""

WORK = "work"
"""The section of what was asked for: a column of it that is equal in all rows stands above the table."""

COLUMNS: tuple[Column, ...] = (
    Column(field="samples_per_s", title="samples/s", section="speed", kind=_RATE, best=_MOST),
    Column(field="predicted_samples_per_s", title="forecast", section="speed", kind=_RATE),
    Column(field="speed_up", title="speed-up", section="speed", unit="x", best=_MOST),
    Column(field="efficiency", title="efficiency", section="speed", kind=_SHARE),
    Column(field="peak_memory_gib", title="measured", section=MEMORY, kind=_GIB, best=_LEAST),
    Column(field="predicted_memory_gib", title="predicted", section=MEMORY, kind=_GIB),
    Column(field="eval_loss", title="eval loss", section="quality", best=_LEAST),
    Column(field="perplexity", title="perplexity", section="quality", best=_LEAST),
    Column(field="exact_match", title="exact match", section="quality", kind=_SHARE, best=_MOST),
    Column(field="train_loss", title="train loss", section="quality", best=_LEAST),
    Column(field="duration_s", title="duration", section="time", kind=_TIME, best=_LEAST),
    Column(field="time_to_first_step_s", title="to first step", section="time", kind=_TIME, best=_LEAST),
    Column(field="useful_tokens_per_s", title="tokens/s, useful", section="tokens and FLOPS", kind=_RATE, best=_MOST),
    Column(field="padded_tokens_per_s", title="tokens/s, padded", section="tokens and FLOPS", kind=_RATE, best=_MOST),
    Column(
        field="tflops_per_device", title="per device", section="tokens and FLOPS", kind=Kind(scales=_FLOPS), best=_MOST
    ),
    Column(field="mfu", title="MFU", section="tokens and FLOPS", kind=_SHARE, best=_MOST),
    Column(field="host_memory_gib", title="host memory", section="host", kind=_GIB, best=_LEAST),
    Column(field="sent_bytes_per_step", title="sent", section="network", kind=Kind(scales=_BYTES), best=_LEAST),
    Column(field="pod_hours", title="pod-hours", section="cost", kind=Kind(digits=3), best=_LEAST),
    Column(field="cost", title="money", section="cost", kind=Kind(digits=3), unit="as priced", best=_LEAST),
    Column(field="slots", title="slots", section=WORK, kind=_COUNT),
    Column(field="global_batch", title="global batch", section=WORK, kind=_COUNT, unit="rows"),
    Column(field="steps", title="steps", section=WORK, kind=_COUNT),
    Column(field="epochs", title="epochs", section=WORK, kind=Kind(digits=3)),
)

_ALONE: Mapping[str, str] = {
    "time_to_first_step_s": "time to first step",
    "useful_tokens_per_s": "useful tokens/s",
    "padded_tokens_per_s": "padded tokens/s",
    "tflops_per_device": "TFLOPS per device",
    "peak_memory_gib": "peak memory measured",
    "predicted_samples_per_s": "forecast of samples/s",
    "predicted_memory_gib": "peak memory predicted",
    "host_memory_gib": "host memory",
    "sent_bytes_per_step": "bytes sent per step and pod",
    "cost": "cost in money",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    column: Column
    unit: str
    size: float
    """What one of it is in the field's own unit."""
    decimals: int

    def write(self, value: float | None) -> str:
        """Write a figure of it, `–` where there is none.

        Example:
            >>> figures_of(COLUMNS[0], [25.13, 7.3]).write(7.3)
            '7.30'
        """
        if value is None or not math.isfinite(value):
            return UNKNOWN
        return f"{value / self.size:,.{self.decimals}f}"

    def of(self, row: BenchmarkRow) -> str:
        return self.write(self.column.value(row))


def figures_of(column: Column, values: Sequence[float]) -> Figures:
    largest = max(abs(value) for value in values)
    unit, size, _ = next(scale for scale in column.kind.scales if largest < scale[2])
    scaled = [abs(value) / size for value in values]
    fixed = column.kind.decimals
    decimals = _decimals(scaled, column) if fixed is None else fixed
    return Figures(column=column, unit=unit or column.unit, size=size, decimals=decimals)


def _decimals(values: Sequence[float], column: Column) -> int:
    """Return the decimals that show the largest figure to its digits and the smallest, that is not 0, to two."""
    positive = [value for value in values if value > 0]
    if not positive:
        return 0
    wanted = column.kind.digits - 1 - math.floor(math.log10(max(positive)))
    least = 1 - math.floor(math.log10(min(positive)))
    return max(0, min(_MOST_DECIMALS, max(wanted, min(least, wanted + 2))))
