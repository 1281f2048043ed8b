"""Find the figures and facts that the kinds of jobs report.

Another package adds a `Reported` by an entry point of the group `workbench.reported`, as
`recipe = "mine.figures:REPORTED"`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from workbench.base import entries
from workbench.rundir.figures.metric import Fact, Metric, Reported

logger = logging.getLogger(__name__)
GROUP = "workbench.reported"
"""Group of the entry points of other packages."""


@cache
def reported() -> tuple[Reported, ...]:
    """Return what the built-in kinds report, then what the kinds of other packages report."""
    places = [*entries.REPORTED, *(each.value for each in entry_points(group=GROUP))]
    found = []
    for place in places:
        module, _, name = place.partition(":")
        try:
            value = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):  # a broken package must not hide the other figures
            logger.warning("%s cannot be loaded; its figures have no titles", place, exc_info=True)
            continue
        if isinstance(value, Reported):
            found.append(value)
        else:
            logger.warning("%s is no Reported; its figures have no titles", place)
    return tuple(found)


@cache
def metrics_of_kinds() -> tuple[Metric, ...]:
    """Return the metrics of all kinds of jobs; of two metrics of a name, the first."""
    metrics: dict[str, Metric] = {}
    for each in reported():
        for metric in each.metrics:
            metrics.setdefault(metric.name, metric)
    return tuple(metrics.values())


@cache
def facts_of_kinds() -> Mapping[str, Fact]:
    """Return the facts of all kinds of jobs by name."""
    facts: dict[str, Fact] = {}
    for each in reported():
        for fact in each.facts:
            facts.setdefault(fact.name, fact)
    return facts
