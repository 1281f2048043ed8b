"""Two ways to do one thing: a row of `make bench`, and how rows are measured."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Turn = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two ways to do one thing."""

    what: str
    """What is measured, with its unit."""
    ours: Turn
    """Do it our way once, and give the figure."""
    plain: Turn
    """Do it the plain way."""
    plain_is: str
    """What the plain way is."""
    bound: str = ""
    """Wanted of our figure (`<= 1.5 s`), the ratio (`>= 4 x`) or ours (`<= 1.02 of plain`)."""
    more_is_better: bool = False
    """Whether the figure is a rate; else it is a time."""
    turns: int = 3
    """Turns that are enough; fewer where one takes minutes."""


@dataclass(slots=True)
class Measured:
    """The figures of a row."""

    pair: Pair
    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    took_s: float = 0.0

    COLUMNS = (
        "measured",
        "ours",
        "plain",
        "the plain way",
        "better by",
        "bound",
        "met",
        "turns",
        "seconds",
    )

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.ours), statistics.median(self.plain)

    @property
    def ratio(self) -> float:
        return _over(*(self.medians if self.pair.more_is_better else self.medians[::-1]))

    @property
    def met(self) -> str:
        """Return whether the bound is met, `yes` or `no`; nothing without one."""
        if not self.pair.bound:
            return ""
        ours, plain = self.medians
        sign, number, unit = f"{self.pair.bound} -".split()[:3]
        value = {"x": self.ratio, "of": _over(ours, plain)}.get(unit, ours)
        return (
            "yes" if (value <= float(number) if sign == "<=" else value >= float(number)) else "no"
        )

    @property
    def cells(self) -> tuple[str, ...]:
        ours, plain = self.medians
        figures = (
            f"{ours:.3g}",
            f"{plain:.3g}",
            self.pair.plain_is,
            f"{self.ratio:.2f} x",
            self.pair.bound,
            self.met,
        )
        return (self.pair.what, *figures, str(len(self.ours)), f"{self.took_s:.0f}")


class Laps:
    """A clock that tells the seconds since it was last asked."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def lap(self) -> float:
        before, self._since = self._since, time.monotonic()
        return self._since - before


def measure(pairs: Sequence[Pair], turns: int, laps: Laps) -> list[Measured]:
    """Let both ways of rows take turns; a plain way that rows share is gone once a turn."""
    rows = [Measured(pair) for pair in pairs]
    turns = min(turns, *(pair.turns for pair in pairs)) if pairs else 0
    for turn in range(turns):
        gone: dict[Turn, float] = {}
        for row in rows:
            print(f"  {row.pair.what}: turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
            row.ours.append(row.pair.ours())
            if row.pair.plain not in gone:
                gone[row.pair.plain] = row.pair.plain()
            row.plain.append(gone[row.pair.plain])
            row.took_s += laps.lap()
    for row in rows:
        print(f"  {' | '.join(row.cells)}", file=sys.stderr, flush=True)
    return rows


def _over(figure: float, other: float) -> float:
    return figure / other if other else math.inf
