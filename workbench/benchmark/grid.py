"""The grid of a benchmark as rows to run: jobs x techniques x pod counts x further options.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import whole
from workbench.base.record import Allowed, Record, Size
from workbench.base.words import counted
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.techniques.registry import TECHNIQUES, technique_of
from workbench.jobs.job import Job
from workbench.jobs.script import Script


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
        return BenchmarkGrid(_unique(self.rows + other.rows), self.left_out + other.left_out)


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
        allowed = {name for job in self.jobs for name in type(job).model_fields} | {
            "global_batch_size"
        }
        for key in self.vary:
            if key in ("technique", "pods"):
                raise ConfigError(
                    f"vary holds {key!r}; give it as `{'techniques' if key == 'technique' else key}`"
                )
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
    asked = _Factors(jobs=jobs, techniques=techniques, pods=pods, vary=vary or {}, repeats=repeats)
    rows: list[PlannedRun] = []
    left_out: list[LeftOut] = []
    vary = asked.vary
    varied = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    choices: Sequence[str | None] = asked.techniques or [None]
    for job, technique, options, count in itertools.product(
        asked.jobs, choices, varied, asked.pods
    ):
        varying = {key: value for key, value in options.items() if len(vary[key]) > 1}
        name = _name(job, technique, varying, count, many=len(asked.jobs) > 1)
        try:
            made = (
                _tuned(job, technique, options, count, slots)
                if isinstance(job, FineTune)
                else job.replace(**options)
            )
        except ConfigError as error:
            left_out.append(LeftOut(name=name, why=str(error)))
            continue
        rows += [
            PlannedRun(job=made, pods=count, repeat=repeat, name=name)
            for repeat in range(asked.repeats)
        ]
    if not rows:
        raise ConfigError(
            f"no row of this grid makes sense; the first: {left_out[0].name}: {left_out[0].why}"
        )
    return BenchmarkGrid(_unique(rows), tuple(left_out))


def _unique(rows: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Keep the first of rows that are the same; a script is the same under every technique."""
    return tuple(
        row for n, row in enumerate(rows) if all(row.work != other.work for other in rows[:n])
    )


def _tuned(
    job: FineTune, given: str | None, options: Mapping[str, object], pods: int, slots: int
) -> FineTune:
    technique = given or job.technique
    alone = technique_of(technique).alone
    technique_of(technique).refuse_ranks(pods if alone else pods * slots)
    changed: dict[str, object] = {**options, **({"technique": str(given)} if given else {})}
    if "global_batch_size" in changed:
        ranks = 1 if alone else pods * slots
        steps = changed.get("gradient_accumulation_steps", job.gradient_accumulation_steps)
        of_one = job.replace(per_device_train_batch_size=1, gradient_accumulation_steps=steps)
        changed |= _batch(changed.pop("global_batch_size"), of_one.global_batch(ranks))
    if technique != job.technique:
        # What only the job's own technique knows does not go with it to another.
        changed = {
            **{each.options: {} for each in TECHNIQUES if each.options},
            "deepspeed": None,
            "device_map": None,
            "max_memory": {},
            **changed,
        }
    return job.replace(**changed)


def _batch(value: object, parts: int) -> dict[str, object]:
    rows = whole(value) or 0
    if rows < 1:
        raise ConfigError(f"global_batch_size is {value!r}; it must be a whole number, 1 or more")
    if rows % parts:
        raise ConfigError(
            f"a global batch of {rows} rows does not divide into {parts} micro-batches a step"
        )
    return {"per_device_train_batch_size": rows // parts}


def _name(
    job: Job, technique: str | None, options: Mapping[str, object], pods: int, *, many: bool
) -> str:
    match job:
        case FineTune():
            what = (
                f"{job.model}, {technique or job.technique}"
                if many
                else str(technique or job.technique)
            )
        case Script():
            what = f"script {job.path}"
        case _:
            what = job.word
    varied = (f"{key.removeprefix('per_device_')} {value}" for key, value in options.items())
    return ", ".join([f"{what} on {counted(pods, 'pod')}", *varied])
