"""The grid of a benchmark as rows to run: jobs x techniques x pod counts x further options.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from workbench.base.errors import ConfigError, one_of
from workbench.base.record import Allowed, Record, Size
from workbench.base.words import pluralize
from workbench.benchmark.labels import differing_options, option_words
from workbench.finetune.techniques.registry import technique_of
from workbench.jobs.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    job: Job
    pods: int
    """On how many pods, the first ones of the cluster."""
    repeat: int = 0
    """Number of the repeat, from 0."""
    name: str = ""
    """Unique name of the row: `zero1 on 3 pods`."""

    @property
    def work(self) -> tuple[object, ...]:
        """Identity of the work, regardless of the name; lists and tuples are equal."""
        return self.job.to_dict(), self.pods, self.repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A combination that makes no sense, and is no row."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class BenchmarkGrid:
    """The runs of a benchmark in order, and the runs that are left out."""

    rows: tuple[PlannedRun, ...]
    left_out: tuple[LeftOut, ...] = ()

    def __add__(self, other: BenchmarkGrid) -> BenchmarkGrid:
        """Append the runs of another grid; a run in both appears once."""
        rows = _unique(self.rows + other.rows)
        left_out = self.left_out + other.left_out
        return BenchmarkGrid(rows, left_out)


class _Factors(Record):
    jobs: Annotated[
        Sequence[Job], Field(min_length=1), Allowed("a list of FineTune or Script jobs")
    ]
    techniques: Annotated[Sequence[str] | None, Allowed("a list of techniques, or None")] = None
    pods: Annotated[
        Sequence[Size], Field(min_length=1), Allowed("a list of whole numbers, 1 or more")
    ] = (1,)
    vary: Annotated[
        Mapping[str, Annotated[Sequence[object], Field(min_length=1)]],
        Allowed(
            'an object that holds lists of values by option, as in {"precision": ["fp32", "bf16"]}'
        ),
    ] = Field(default_factory=dict)
    repeats: Size = 1

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for technique in self.techniques or ():
            technique_of(technique)  # or refuse it
        allowed = {"global_batch_size"}
        for job in self.jobs:
            allowed.update(type(job).model_fields)
        arguments = {"technique": "techniques", "pods": "pods"}
        for key in self.vary:
            if key in arguments:
                argument = arguments[key]
                raise ConfigError(f"vary holds {key!r}; give the values as `{argument}`")
            if key not in allowed:
                raise one_of("vary key", key, sorted(allowed))
        return self


def make_grid(
    jobs: Sequence[Job],
    techniques: Sequence[str] | None = None,
    pods: Sequence[int] = (1,),
    vary: Mapping[str, Sequence[object]] | None = None,
    repeats: int = 1,
    slots: int = 1,
) -> BenchmarkGrid:
    """Multiply jobs, techniques, pod counts and options."""
    asked = _Factors(
        jobs=jobs,
        techniques=techniques,
        pods=pods,
        vary=vary or {},
        repeats=repeats,
    )
    rows: list[PlannedRun] = []
    left_out: list[LeftOut] = []
    alone = len(asked.jobs) == 1
    # A row's name has the factors in which the rows differ.
    for job, technique, varied, count in _combinations(asked):
        options = dict(varied)
        if technique is not None and "technique" in type(job).model_fields:
            options["technique"] = technique
        parts = [f"{job.views.grid_name(options, alone=alone)} on {pluralize(count, 'pod')}"]
        for option, value in varied.items():
            if len(asked.vary[option]) > 1:
                parts += option_words(option, value, asked.vary[option])
        name = ", ".join(parts)
        # A combination that cannot run is left out and named, and the others run.
        try:
            changed = job.views.in_grid(options, pods=count, slots=slots)
        except ConfigError as error:
            left_out.append(LeftOut(name=name, why=str(error)))
            continue
        for repeat in range(asked.repeats):
            planned = PlannedRun(
                job=changed,
                pods=count,
                repeat=repeat,
                name=name,
            )
            rows.append(planned)
    if not rows:
        first = left_out[0]
        raise ConfigError(f"no row of the grid makes sense; the first: {first.name}: {first.why}")
    return BenchmarkGrid(_told_apart(_unique(rows)), tuple(left_out))


def _combinations(
    asked: _Factors,
) -> Iterator[tuple[Job, str | None, Mapping[str, object], int]]:
    """Yield job, technique, varied options and number of pods of every row, in order."""
    techniques: Sequence[str | None] = asked.techniques or [None]
    varied = []
    for values in itertools.product(*asked.vary.values()):
        options = dict(zip(asked.vary, values, strict=True))
        varied.append(options)
    return itertools.product(asked.jobs, techniques, varied, asked.pods)


def _unique(rows: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Keep the first of rows that are the same; a script is the same under every technique."""
    kept: list[PlannedRun] = []
    for row in rows:
        is_new = all(row.work != other.work for other in kept)
        if is_new:
            kept.append(row)
    return tuple(kept)


def _told_apart(rows: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Append the different options to the names of rows whose jobs have the same name."""
    jobs: dict[str, list[Mapping[str, object]]] = {}
    for row in rows:
        jobs.setdefault(row.name, []).append(row.job.to_dict())
    named = []
    for row in rows:
        words = differing_options(row.job.to_dict(), jobs[row.name])
        named.append(replace(row, name=", ".join([row.name, *words])))
    return tuple(named)
