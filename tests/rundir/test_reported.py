"""Figures and facts of a kind of job, of this package and of others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from workbench.finetune.options.reported import REPORTED
from workbench.results import FineTuneResult
from workbench.rundir.events import Event
from workbench.rundir.figures import reported
from workbench.rundir.figures.metric import Fact, Metric, Reported
from workbench.rundir.figures.metrics import known
from workbench.rundir.totals import RunTotals

OTHER = Reported(metrics=(Metric(name="mood", title="mood"),), facts=(Fact(name="greeted"),))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install three packages: one with figures, a broken one, and one with something else."""
    places = (f"{__name__}:OTHER", "no.such.module:REPORTED", "workbench:VERSION")
    points = [EntryPoint(name="x", value=place, group=reported.GROUP) for place in places]
    caches = (reported.reported, reported.metrics_of_kinds, reported.facts_of_kinds)
    monkeypatch.setattr(reported, "entry_points", lambda group: points)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_every_fact_of_a_fine_tuning_job_is_a_field_of_its_result() -> None:
    own = FineTuneResult.__annotations__.keys() - FineTuneResult.__base__.__annotations__.keys()
    assert {fact.name for fact in REPORTED.facts} == own


def test_another_package_adds_figures_and_a_broken_one_hides_none(
    others: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, type(sys)(__name__)))
    monkeypatch.setattr(sys.modules[__name__], "OTHER", OTHER, raising=False)
    with caplog.at_level(logging.WARNING):
        mood = known("mood")
    assert mood is not None and mood.title == "mood"
    assert known("perplexity") is not None
    assert len(caplog.records) == 2
    end = Event(time_s=1.0, rank=0, kind="end", data={"greeted": 3, "other": 4})
    facts = RunTotals.of([end]).facts(None)
    assert facts["greeted"] == 3 and "other" not in facts
