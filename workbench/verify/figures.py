"""Figures of runs and limits; both errors of a failed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.base.errors import RunError, WorkbenchError

if TYPE_CHECKING:
    from workbench import Run


class Cannot(WorkbenchError):
    """The claim cannot be tried on these pods; the message has the reason."""


class Broken(WorkbenchError):
    """The claim was tried and is not true here; the message has the figures."""


def curve(run: Run, name: str) -> list[float]:
    """Return the values of a figure at all steps, from rank 0."""
    values = [event.number(name) for event in run.events() if event.kind == "step"]
    return [value for value in values if value is not None]


def engine(run: Run) -> Mapping[str, Any]:
    """Return the counts of the first rank on the tensors after the first step."""
    for event in run.events():
        if event.kind == "engine":
            return event.data
    raise RunError(f"{run.id} reported no state of its engine; see {run.paths.logs}")


def difference(got: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of two curves.

    Example:
        >>> difference([2.0, 1.1], [2.0, 1.0])  # doctest: +ELLIPSIS
        0.1...
    """
    if len(got) != len(expected) or not got:
        raise Broken(f"{len(got)} steps have a figure, and {len(expected)} were expected")
    largest = 0.0
    for one, other in zip(got, expected, strict=True):
        off = abs(one - other) / max(abs(other), 1e-12)
        # NaN compares as unequal to everything, so a maximum would lose it.
        if off != off:
            raise Broken("a figure is not a number")
        largest = max(largest, off)
    return largest


def at_most(what: str, value: float, limit: float) -> str:
    """Return the figure in words, or raise Broken if the figure is above the limit."""
    words = f"{what} {value:.3g}"
    if not value <= limit:
        raise Broken(f"{words}, at most {limit:g} allowed")
    return words
