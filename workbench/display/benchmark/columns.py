"""The columns of a benchmark's table, which pick unit and decimals once for all rows.

How a row ended, for the eye.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.json_values import number
from workbench.base.table import Tone
from workbench.base.words import UNKNOWN, counted, gib, plain
from workbench.benchmark.row import BenchmarkRow, Outcome

_MOST_DECIMALS = 5

MARKS: Mapping[Outcome, str] = {
    Outcome.SUCCEEDED: "✓",
    Outcome.OUT_OF_MEMORY: "▲",
    Outcome.FAILED: "✗",
    Outcome.STOPPED: "◧",
    Outcome.CANCELLED: "■",
    Outcome.SKIPPED: "▷",
    Outcome.RUNNING: "●",
    Outcome.WAITING: "○",
}
"""A mark for each outcome, unlike in shape: colour alone would tell some readers nothing."""

TONES: Mapping[Outcome, Tone] = {
    Outcome.SUCCEEDED: "good",
    Outcome.OUT_OF_MEMORY: "bad",
    Outcome.FAILED: "bad",
    Outcome.STOPPED: "quiet",
    Outcome.CANCELLED: "warn",
    Outcome.SKIPPED: "warn",
    Outcome.RUNNING: "busy",
    Outcome.WAITING: "quiet",
}

Scale = tuple[str, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    scales: Sequence[Scale] = (("", 1.0, math.inf),)
    """Unit, size of the unit, and largest figure in the unit; the last entry takes all."""
    digits: int = 3
    """Significant digits of the largest figure."""
    decimals: int | None = None
    """Digits behind the point, where these do not depend on the figures."""


_COUNT = Kind(decimals=0)
_PLAIN = Kind(digits=4)
_TIME = Kind(
    scales=(
        ("s", 1.0, 600.0),
        ("min", 60.0, 3 * 3600.0),
        ("h", 3600.0, math.inf),
    ),
    digits=4,
)
_BYTES = Kind(scales=(("kB", 1e3, 1e6), ("MB", 1e6, 1e10), ("GB", 1e9, math.inf)))
_GIB = Kind(scales=(("MiB", 1 / 1024, 0.1), ("GiB", 1.0, math.inf)))
_FLOPS = Kind(scales=(("GFLOPS", 1e-3, 0.1), ("TFLOPS", 1.0, math.inf)))
_SHARE = Kind(scales=(("%", 0.01, math.inf),), decimals=1)
_MOST = 1
_LEAST = -1


@dataclass(frozen=True, slots=True)
class Column:
    field: str
    title: str
    kind: Kind = _PLAIN
    unit: str = ""
    """The unit where the kind has none."""
    best: int = 0
    """1 where the largest figure is the best, -1 where the smallest is, 0 where none is better than
    another."""
    alone: str = ""
    """Title of the column outside of the table, if different."""
    asked: bool = False
    """Whether it is a requested option. A column of equal values stands above the table."""

    @property
    def name(self) -> str:
        return self.alone or self.title

    def value(self, row: BenchmarkRow) -> float | None:
        """Return a row's figure; None where it was not measured, or cannot be written."""
        return number(getattr(row, self.field))


COLUMNS: tuple[Column, ...] = (
    Column("samples_per_s", "samples/s", best=_MOST),
    Column("speed_up", "speed-up", unit="x", best=_MOST),
    Column("efficiency", "efficiency", _SHARE),
    Column("peak_memory_gib", "memory measured", _GIB, best=_LEAST, alone="peak memory measured"),
    Column("predicted_memory_gib", "memory predicted", _GIB, alone="peak memory predicted"),
    Column("eval_loss", "eval loss", best=_LEAST),
    Column("perplexity", "perplexity", best=_LEAST),
    Column("exact_match", "exact match", _SHARE, best=_MOST),
    Column("train_loss", "train loss", best=_LEAST),
    Column("duration_s", "duration", _TIME, best=_LEAST),
    Column(
        "time_to_first_step_s",
        "to first step",
        _TIME,
        best=_LEAST,
        alone="time to first step",
    ),
    Column(
        "useful_tokens_per_s",
        "tokens/s, useful",
        best=_MOST,
        alone="useful tokens/s",
    ),
    Column(
        "padded_tokens_per_s",
        "tokens/s, padded",
        best=_MOST,
        alone="padded tokens/s",
    ),
    Column(
        "tflops_per_device",
        "per device",
        _FLOPS,
        best=_MOST,
        alone="TFLOPS per device",
    ),
    Column("mfu", "MFU", _SHARE, best=_MOST),
    Column("host_memory_gib", "host memory", _GIB, best=_LEAST),
    Column(
        "sent_bytes_per_step",
        "sent",
        _BYTES,
        best=_LEAST,
        alone="bytes sent per step and pod",
    ),
    Column("pod_hours", "pod-hours", Kind(), best=_LEAST),
    Column("cost", "money", Kind(), unit="as priced", best=_LEAST, alone="cost in money"),
    Column("slots", "slots", _COUNT, asked=True),
    Column("global_batch", "global batch", _COUNT, unit="rows", asked=True),
    Column("steps", "steps", _COUNT, asked=True),
    Column("epochs", "epochs", Kind(), asked=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    column: Column
    unit: str
    size: float
    """Size of the unit in terms of the field's own unit."""
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
    decimals = column.kind.decimals
    if decimals is None:
        scaled = [abs(value) / size for value in values]
        decimals = _decimals(scaled, column)
    return Figures(
        column=column,
        unit=unit or column.unit,
        size=size,
        decimals=decimals,
    )


def _decimals(values: Sequence[float], column: Column) -> int:
    """Return the decimals for the digits of the largest and smallest nonzero figure."""
    positive = [value for value in values if value > 0]
    if not positive:
        return 0
    wanted = column.kind.digits - 1 - math.floor(math.log10(max(positive)))
    least = 1 - math.floor(math.log10(min(positive)))
    # The smallest figure may add two decimals at most.
    decimals = max(wanted, min(least, wanted + 2))
    return max(0, min(_MOST_DECIMALS, decimals))


def label_of(row: BenchmarkRow, name: str = "") -> str:
    """Return a short label of a row. Its name appears if other rows have its technique and pods.

    Example:
        >>> job = {"model": "tiny-t5", "technique": "zero1", "pods": 3}
        >>> row = BenchmarkRow(name="a", outcome=Outcome.WAITING, repeat=1, **job)
        >>> label_of(row)
        'tiny-t5 zero1 on 3 pods, repeat 2'
    """
    what = " ".join(part for part in (row.model, row.technique) if part) or row.name
    where = f" on {counted(row.pods, 'pod')}" if row.pods else ""
    _, comma, extra = name.partition(", ")
    repeat = f", repeat {row.repeat + 1}" if row.repeat else ""
    return plain(what + where + comma + extra + repeat)


def why_of(row: BenchmarkRow) -> str:
    """Return why a row failed, was skipped or ran out of memory, with what was asked for.

    Empty where all went well.
    """
    parts = [plain(row.reason)]
    if row.wanted_gib is not None:
        parts.append(f"asked for {gib(row.wanted_gib)}")
    if row.free_gib is not None:
        if row.memory_kind == "cuda":
            parts.append(f"{gib(row.free_gib)} free")
        else:
            parts.append(f"limit {gib(row.free_gib)}")
    return ", ".join(part for part in parts if part)
