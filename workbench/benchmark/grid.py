"""The grid of a benchmark: jobs x techniques x pod counts x whatever else varies, as rows to run. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.errors import ConfigError, one_of
from workbench.jobs.choices import Technique
from workbench.jobs.finetune import FineTune, Job
from workbench.jobs.script import Script

__all__ = ["BenchmarkGrid", "LeftOut", "PlannedRun", "make_grid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run that a benchmark asks for."""

    job: Job
    """What runs."""
    pods: int
    """On how many pods, the first ones of the cluster."""
    repeat: int = 0
    """Which repeat of the same row it is, from 0."""
    name: str = ""
    """What tells it from the others, in words: `zero1 on 3 pods`."""

    @property
    def work(self) -> tuple[object, ...]:
        """What is the same for the same run, however it is called; lists and tuples are one."""
        return self.job.to_dict(), self.pods, self.repeat


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A combination that makes no sense, and is no row."""

    name: str
    """Which, in words."""
    why: str
    """Why."""


@dataclass(frozen=True, slots=True)
class BenchmarkGrid:
    """The runs of a benchmark, in the order in which they go, and what is left out."""

    rows: tuple[PlannedRun, ...]
    """One a run."""
    left_out: tuple[LeftOut, ...] = ()
    """One a combination."""

    def __add__(self, other: BenchmarkGrid) -> BenchmarkGrid:
        """Put the runs of another grid behind these; a run that is in both goes once."""
        return BenchmarkGrid(_unique(self.rows + other.rows), self.left_out + other.left_out)


def make_grid(
    jobs: Sequence[Job],
    techniques: Sequence[str] | None = None,
    pods: Sequence[int] = (1,),
    vary: Mapping[str, Sequence[object]] | None = None,
    repeats: int = 1,
    slots: int = 1,
) -> BenchmarkGrid:
    """Multiply jobs, techniques, pod counts and options."""
    vary = dict(vary or {})
    _check(jobs, techniques, pods, vary, repeats)
    rows: list[PlannedRun] = []
    left_out: list[LeftOut] = []
    choices: list[str | None] = list(techniques) if techniques else [None]
    varied = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    for job, technique, options, count in itertools.product(jobs, choices, varied, pods):
        varying = {key: value for key, value in options.items() if len(vary[key]) > 1}
        name = _name(job, technique, varying, count, many=len(jobs) > 1)
        try:
            made = _made(job, technique, options, count, slots)
        except ConfigError as error:
            left_out.append(LeftOut(name=name, why=str(error)))
            continue
        rows += [PlannedRun(job=made, pods=count, repeat=repeat, name=name) for repeat in range(repeats)]
    if not rows:
        raise ConfigError(f"no row of this grid makes sense; the first: {left_out[0].name}: {left_out[0].why}")
    return BenchmarkGrid(_unique(rows), tuple(left_out))


def _unique(rows: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Keep the first of rows that are the same; a script is the same under every technique."""
    return tuple(row for n, row in enumerate(rows) if all(row.work != other.work for other in rows[:n]))


def _made(job: Job, technique: str | None, options: Mapping[str, object], pods: int, slots: int) -> Job:
    """Return the job of one row."""
    if not isinstance(job, FineTune):
        return job.replace(**options)
    technique = technique or job.technique
    if technique == Technique.SINGLE and pods > 1:
        raise ConfigError("`single` is one rank: it runs on one pod only")
    changed: dict[str, object] = {**options, "technique": str(technique)}
    if "global_batch_size" in changed:
        ranks = 1 if technique == Technique.SINGLE else pods * slots
        steps = changed.get("gradient_accumulation_steps", job.gradient_accumulation_steps)
        of_one = job.replace(per_device_train_batch_size=1, gradient_accumulation_steps=steps)
        changed |= _batch(changed.pop("global_batch_size"), of_one.global_batch(ranks))
    if technique != job.technique:
        # What only the job's own technique knows does not go with it to another.
        changed = {"fsdp": {}, "deepspeed": None, **changed}
    return job.replace(**changed)


def _batch(rows: object, parts: int) -> dict[str, object]:
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"global_batch_size is {rows!r}; it must be a whole number, 1 or more")
    if rows % parts:
        raise ConfigError(f"a global batch of {rows} rows does not divide into {parts} micro-batches a step")
    return {"per_device_train_batch_size": rows // parts}


def _name(job: Job, technique: str | None, options: Mapping[str, object], pods: int, *, many: bool) -> str:
    what = str(technique or job.technique) if isinstance(job, FineTune) else f"script {job.path}"
    model = [job.model] if many and isinstance(job, FineTune) else []
    where = f"{what} on {pods} {'pod' if pods == 1 else 'pods'}"
    return ", ".join([*model, where, *(f"{key.removeprefix('per_device_')} {value}" for key, value in options.items())])


def _check(
    jobs: Sequence[Job],
    techniques: Sequence[str] | None,
    pods: Sequence[int],
    vary: Mapping[str, Sequence[object]],
    repeats: int,
) -> None:
    if isinstance(jobs, FineTune | Script) or not jobs or not all(isinstance(job, FineTune | Script) for job in jobs):
        raise ConfigError(f"jobs is {jobs!r}; give a list of FineTune or Script jobs")
    if isinstance(pods, int) or not pods:
        raise ConfigError(f"pods is {pods!r}; give a list of whole numbers, such as [1, 2, 3]")
    if isinstance(techniques, str):
        raise ConfigError(f"techniques is {techniques!r}; give a list, [{techniques!r}]")
    for technique in techniques or ():
        if technique not in list(Technique):
            raise one_of("technique", technique, list(Technique))
    for count in pods:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"pods holds {count!r}; give whole numbers, 1 or more")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ConfigError(f"repeats is {repeats!r}; it must be a whole number, 1 or more")
    allowed = {name for job in jobs for name in type(job).model_fields} | {"global_batch_size"}
    for key, values in vary.items():
        if key in ("technique", "pods"):
            raise ConfigError(f"vary holds {key!r}; give it as `{'techniques' if key == 'technique' else key}`")
        if key not in allowed:
            raise one_of("vary key", key, sorted(allowed))
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"vary[{key!r}] is {values!r}; give a list of values")
