"""`Curve`: numbers over steps or over time, kept small, and thinned for the eye. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator


class Curve:
    """A growing list of (x, value, time) at 24 bytes each; what is not a finite number is left out."""

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
        """Take away what was added last, as far as it lies beyond x: a run went back there."""
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
        """When the newest value was, in seconds since 1970; not a number where that was not told."""
        return self._time_s[-1] if self._time_s else math.nan

    def thinned(self, limit: int = 400) -> tuple[list[float], list[float], list[float]]:
        """Return x, values and times of at most so many points; of each stretch left out, lowest and highest stay.

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
        return [self._x[i] for i in order], [self._y[i] for i in order], [self._time_s[i] for i in order]

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return iter(zip(self._x, self._y, strict=True))
