"""Notice a training that begins again in a run, such as every fold of a cross-validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_MOST = 50  # names, so that memory stays bounded


def begins_again(step: float, *, first: float, last: float) -> bool:
    """Return whether a report goes back to the first step of its line: another training began."""
    return step < last and step <= first


class Trainings:
    """Steps of every figure. A figure whose first step comes again belongs to a new training.

    Loops with counters of their own report different figures, so every figure counts for itself.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._beyond: set[str] = set()
        """Figures that were reported after their first step."""
        self._highest = -1
        self._returns: Counter[str] = Counter()
        self._step = 0

    def take(self, step: int | None, figures: Mapping[str, float]) -> None:
        """Count a report of figures; a report without figures counts as a figure of its own."""
        if step is None:
            return
        names = figures.keys() or {""}
        # Most steps are the highest so far, with figures that are known.
        if step > self._highest and names <= self._first.keys():
            self._highest = step
            self._beyond.update(names)
            return
        goes_back = False
        for name in names:
            if name not in self._first and len(self._first) >= _MOST:
                continue
            first = self._first.setdefault(name, step)
            if step > first:
                self._beyond.add(name)
            elif name in self._beyond:
                self._first[name] = step
                self._beyond.discard(name)
                self._returns[name] += 1
                self._step = step
                goes_back = True
        self._highest = step if goes_back else max(step, self._highest)

    def restart(self) -> None:
        """Begin anew: the steps of a restarted run are no new training."""
        self._first = {}
        self._beyond = set()
        self._highest = -1

    @property
    def ended(self) -> int:
        """Number of trainings before the last one."""
        return max(self._returns.values(), default=0)

    def note(self) -> str:
        """Return the note for the user; empty for a single training."""
        count = self.ended
        if not count:
            return ""
        times = {1: "once", 2: "twice"}.get(count, f"{count} times")
        return (
            f"training began again at step {self._step}, {times}: a plot has a line per training, "
            "and the figures are those of the last training"
        )
