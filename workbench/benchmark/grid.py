"""The grid of a benchmark as rows to run: jobs x techniques x pod counts x further options.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from workbench.base.errors import ConfigError, one_of
from workbench.base.record import Allowed, Record, Size
from workbench.base.words import counted
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
    for job, technique, varied, count in _combinations(asked):
        options = dict(varied)
        if technique is not None and "technique" in type(job).model_fields:
            options["technique"] = technique
        several = {}
        for option, value in varied.items():
            if len(asked.vary[option]) > 1:
                several[option] = value
        job_name = job.views.grid_name(options, alone=alone)
        name = _row_name(job_name, several, count)
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
    return BenchmarkGrid(_unique(rows), tuple(left_out))


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


def _row_name(job: str, several: Mapping[str, object], pods: int) -> str:
    """Name a row by its job, its pods and its options with several values in the grid."""
    parts = [f"{job} on {counted(pods, 'pod')}"]
    for name, value in several.items():
        option = name.removeprefix("per_device_")
        parts.append(f"{option} {value}")
    return ", ".join(parts)
