"""Records of a metric, and of the figures and facts that a kind of job reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workbench.base.words import number
from workbench.rundir.events import EventKind

Write = Callable[[float | None], str]
"""Function that formats a value, such as `number` and `percent`; None is unknown."""


class Better(StrEnum):
    """Direction in which a metric improves."""

    GREATER = "greater"
    LESS = "less"
    NONE = ""
    """Neither direction is better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    name: str
    """Name in events, plots, `history` and `compare`."""
    event: EventKind = EventKind.STEP
    """Kind of the events that have the metric: STEP or EVAL."""
    title: str
    """Words for the metric in the panel, in tables, and for its line in a plot."""
    unit: str = ""
    """Title of the y axis. Empty: the title."""
    better: Better = Better.NONE
    write: Write = number
    """Function that formats a value."""
    plot: str = ""
    """Title of the plot. Empty: the title."""
    in_panel: bool = True
    """Whether the panel draws the metric's own plot. The panel shows the last value always."""
    in_tables: bool = True
    """Whether `history` and `compare` have a column for the last value.

    False: a field of the result stands in the tables, or the last value says little about the run.
    """
    aliases: tuple[str, ...] = ()
    """Other names of the metric among the scalars that a script writes for TensorBoard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A value that the ranks of a kind report at their start or end, or with an evaluation."""

    name: str
    """Name in the events and in `result.json`."""
    title: str = ""
    """Title of the column in `compare`. Empty: no column."""
    write: Callable[[Any], str] = number
    """Function that formats a value."""
    in_history: bool = False
    """Whether the data frame of `history` has a column of the name."""
    is_word: bool = False
    """Whether the value is a word that belongs beside the model's name; `none` is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Figures and facts that a kind of job reports, besides those of every kind."""

    metrics: tuple[Metric, ...] = ()
    """Metrics in the order of the panel."""
    facts: tuple[Fact, ...] = ()
    """Facts of the result, in the order of the columns."""
