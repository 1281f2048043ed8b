"""Notice a training that begins again in a run, such as every fold of a cross-validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_MOST = 50  # names, so that memory stays bounded


class Trainings:
    """Steps of every figure. A figure whose first step comes again belongs to a new training.

    Loops with counters of their own report different figures, so every figure counts for itself.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._returns: Counter[str] = Counter()
        self._step = 0

    def take(self, step: int | None, names: Iterable[str]) -> None:
        """Count a report of figures; a report without figures counts as a figure of its own."""
        if step is None:
            return
        for name in list(names) or [""]:
            if name not in self._last and len(self._last) >= _MOST:
                continue
            first = self._first.setdefault(name, step)
            if step <= first and step < self._last.get(name, step):
                self._first[name] = step
                self._returns[name] += 1
                self._step = step
            self._last[name] = step

    def restart(self) -> None:
        """Begin anew: the steps of a restarted run are no new training."""
        self._first = {}
        self._last = {}

    def note(self) -> str:
        """Return the note for the user; empty for a single training."""
        if not self._returns:
            return ""
        count = max(self._returns.values())
        times = {1: "once", 2: "twice"}.get(count, f"{count} times")
        return (
            f"training began again at step {self._step}, {times}: the figures are those of the last"
        )
