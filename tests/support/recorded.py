"""Forecasts and measurements of a file of `record.py`, by the product's own functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from workbench import FineTune
from workbench.finetune.plan.plan import plan
from workbench.finetune.plan.table import Interval, TimedStep, Turn
from workbench.pods.doctor.exchange import Exchange

ROWS = 8
ACCUMULATION = 2
"""Of the plan's timed steps."""


@dataclass(frozen=True)
class Outcome:
    technique: str
    accumulation: int
    pods: int
    predicted: float
    within: Interval
    measured: float
    """Speed-up of the runs over the runs of `single` before and after."""

    @property
    def inside(self) -> bool:
        return self.within.low <= self.measured <= self.within.high

    @property
    def width(self) -> float:
        """Width of the interval as a share of the figure."""
        return (self.within.high - self.within.low) / self.predicted

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def records(file: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def turns_of(record: Mapping[str, Any]) -> list[Turn]:
    turns = []
    for recorded in record["turns"]:
        turn = []
        for technique, pods, step_s, micro_batch_s in recorded:
            timed = TimedStep(
                technique=technique,
                pods=pods,
                rows=ROWS,
                accumulation=ACCUMULATION,
                step_s=step_s,
                micro_batch_s=micro_batch_s,
            )
            turn.append(timed)
        turns.append(tuple(turn))
    return turns


def exchange_of(record: Mapping[str, Any]) -> Exchange:
    raw = record["exchange"]
    pairs = {name: tuple(map(tuple, raw[name])) for name in ("sizes", "slowdowns")}
    return Exchange(**{**raw, **pairs})


@dataclass
class Case:
    """Step times of runs, with runs of `single` on one pod before and after the others."""

    accumulation: int
    pods: int
    took: list[tuple[str, float]] = field(default_factory=list)
    """Technique and seconds of a step, in the order of the runs."""

    def add(self, technique: str, step_s: float | None) -> None:
        assert step_s is not None
        self.took.append((technique, step_s))

    def speed_ups(self) -> dict[str, float]:
        """Return the median speed-up of every technique over the `single` beside its runs."""
        singles = [place for place, (technique, _) in enumerate(self.took) if technique == "single"]
        found: dict[str, list[float]] = {}
        for place, (technique, step_s) in enumerate(self.took):
            if technique == "single":
                continue
            before = max(single for single in singles if single < place)
            after = min(single for single in singles if single > place)
            alone_s = (self.took[before][1] + self.took[after][1]) / 2
            found.setdefault(technique, []).append(self.pods * alone_s / step_s)
        return {technique: median(ratios) for technique, ratios in found.items()}


def outcomes(record: Mapping[str, Any], job: FineTune) -> Iterator[Outcome]:
    """Yield the forecasts and the measurements of a record."""
    cases = []
    for run in record["runs"]:
        took = [(technique, step_s) for technique, step_s in run["took"]]
        cases.append(Case(run["accumulation"], run["pods"], took))
    return compare(job, turns_of(record), exchange_of(record), cases)


def compare(
    job: FineTune,
    turns: Sequence[Turn],
    exchange: Exchange | None,
    cases: Sequence[Case],
) -> Iterator[Outcome]:
    """Yield the forecast and the measurement of every technique that was run."""
    for case in cases:
        planned = job.replace(gradient_accumulation_steps=case.accumulation)
        table = plan(planned, pods=case.pods, turns=turns, exchange=exchange)
        for technique, measured in case.speed_ups().items():
            row = table.row(technique)
            assert row.speed_up is not None
            yield Outcome(
                technique=technique,
                accumulation=case.accumulation,
                pods=case.pods,
                predicted=row.speed_up,
                within=row.within["speed_up"],
                measured=measured,
            )
