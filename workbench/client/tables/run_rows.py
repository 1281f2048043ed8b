"""The rows of `to_dataframe` for runs: of a history, of a comparison, and of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from workbench.base.files import read_json
from workbench.base.json_values import as_float, as_str, get_object
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.figures.metric import Fact
from workbench.rundir.figures.reported import facts_of_kinds
from workbench.rundir.paths import RunPaths

_COLUMNS = (
    "id",
    "name",
    "note",
    "tags",
    "submitted_s",
    "state",
    "message",
    "model",
    "technique",
    "precision",
    "pods",
    "world_size",
    "steps",
    "epochs",
    "global_batch_size",
    "learning_rate",
    "train_loss",
    "first_eval_loss",
    "eval_loss",
    "eval_step",
    "train_samples_per_s",
    "duration_s",
    "gpu_hours",
    "pod_hours",
    "user",
    "time_to_first_step_s",
    "train_runtime_s",
    "peak_memory_gib",
    "device",
    "devices",
    "path",
)
_LAST_BEFORE_FACTS = "eval_step"
# Other columns show these options, or the values have no meaning.
SHOWN = frozenset(("kind", "model", "technique", "env", "max_steps"))


def columns() -> tuple[str, ...]:
    """Return the columns of every data frame, with those of the kinds of jobs."""
    of_kinds = [name for name, fact in facts_of_kinds().items() if _has_column(fact)]
    place = _COLUMNS.index(_LAST_BEFORE_FACTS) + 1
    return (*_COLUMNS[:place], *of_kinds, *_COLUMNS[place:])


def rows_of(records: Sequence[RunRecord]) -> list[dict[str, object]]:
    """Return a row per run: figures, metrics, figures of steps, and options that differ."""
    rows = []
    for record in records:
        row = {name: figure_of(record, name) for name in columns()}
        for name, value in record.metrics.items():
            row[f"metric.{name}"] = value
        for name, value in record.step_figures.items():
            row[f"step.{name}"] = value
        rows.append(row)
    return with_options(rows, jobs_of(records))


def with_options(
    rows: Sequence[dict[str, object]], jobs: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Add a column to the rows for every option that differs between their jobs."""
    options = different_options(jobs)
    different = []
    for place, row in enumerate(rows):
        values = {f"option.{name}": values[place] for name, values in options.items()}
        different.append({**row, **values})
    return different


def jobs_of(records: Sequence[RunRecord]) -> list[Mapping[str, object]]:
    """Return the job of every run, as in the specification."""
    return [get_object(read_json(RunPaths(record.path).spec), "job") for record in records]


def different_options(
    jobs: Sequence[Mapping[str, object]], leave_out: Collection[str] = SHOWN
) -> dict[str, list[object]]:
    """Return the options that differ between jobs, with the value of each job.

    A value is None for a job without the option. A part of a mapping is an option of its own.

    Example:
        >>> one = {"kind": "a", "seed": 1, "dataset": {"kind": "csv", "rows": 100}}
        >>> other = {"kind": "a", "seed": 1, "dataset": {"kind": "csv", "rows": 20}}
        >>> different_options([one, other, {"kind": "b", "path": "x.py"}])
        {'dataset.rows': [100, 20, None]}
    """
    flat = [flat_options(job) for job in jobs]
    different = {}
    for name in differing(flat):
        if name.partition(".")[0] not in leave_out:
            different[name] = [options.get(name) for options in flat]
    return different


def flat_options(job: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a job without environment variables, the nested as `outer.inner`."""
    return dict(_flat({name: value for name, value in job.items() if name != "env"}))


def differing(jobs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of options with several values, or that one of two alike jobs lacks."""
    kinds = [str(options.get("kind")) for options in jobs]
    names = dict.fromkeys(name for options in jobs for name in options)
    different = []
    for name in names:
        known = {str(options[name]) for options in jobs if name in options}
        # A kind of job without the option is no difference.
        pairs = {(kind, name in options) for kind, options in zip(kinds, jobs, strict=True)}
        if len(known) > 1 or len(pairs) > len({*kinds}):
            different.append(name)
    return different


def _flat(options: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


def _has_column(fact: Fact) -> bool:
    return bool(fact.in_history or fact.title)


def figure_of(record: RunRecord, name: str) -> object:
    if name == "peak_memory_gib":
        return max(record.peak_memory_gib.values(), default=None)
    if name == "tags":
        return ", ".join(record.tags)
    if name.startswith("metric."):
        return record.metrics.get(name.removeprefix("metric."))
    if name.startswith("step."):
        return record.step_figures.get(name.removeprefix("step."))
    fact = facts_of_kinds().get(name)
    if fact is not None and _has_column(fact):
        value = record.of_kind.get(name)
        return as_str(value) if fact.is_word else as_float(value)
    if name not in _COLUMNS:
        return record.metrics.get(name, record.step_figures.get(name))
    figure: object = getattr(record, name)
    if name in ("path", "state"):
        return str(figure)
    return figure
