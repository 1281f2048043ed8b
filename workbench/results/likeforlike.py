"""What rows of a benchmark are compared with each other: the records.

Only rows that did the same work stand in one group; a group of other work says how it differs from the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.results.rows import Row

__all__ = ["Group", "Spread", "Summary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A figure over the repeats of one row."""

    median: float
    """The middle value; of an even number the mean of the two in the middle."""
    low: float
    """The smallest."""
    high: float
    """The largest."""
    count: int
    """How many repeats measured it."""

    def overlaps(self, other: Spread) -> bool:
        """Tell whether the two ranges, from smallest to largest, share a value."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One line of the table: the repeats of one row, folded."""

    name: str
    """What tells it from the others of its group, in words: `zero1 on 3 pods`."""
    row: Row
    """The line to draw: every figure is the median over the repeats that succeeded (of the only run without repeats);
    `speed_up` and `efficiency` are filled. Where none succeeded, it is the last repeat as it stands."""
    rows: tuple[Row, ...]
    """The repeats themselves, in order."""
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """By field of `Row`, where more than one repeat measured it; the spread is from the smallest to the largest."""
    baseline: str = ""
    """Name of the summary that `speed_up` is over: the one-pod row of the same technique, or else `single`."""

    @property
    def key(self) -> str:
        """The key that its rows share."""
        return self.row.key


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that may be compared: same model, global batch, steps, precision, data and sequence handling."""

    same: Mapping[str, object]
    """What is equal in it, by what it is called: `{"model": "tiny-t5", "global batch": 24, "steps": 20, …}`; None for
    what no row of it tells."""
    summaries: tuple[Summary, ...]
    """Its lines, in the order in which the benchmark asked for them."""
    difference: str = ""
    """How it differs from the first group, in words: `global batch 96 instead of 32`; empty for the first."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All its rows, repeats one by one."""
        return tuple(row for summary in self.summaries for row in summary.rows)
