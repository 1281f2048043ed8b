"""The rows of `to_dataframe` for runs: of a history, and of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base.files import read_json
from workbench.base.json_values import number, part, text
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.paths import RunPaths
from workbench.rundir.reported import facts_of_kinds

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
    "time_to_first_step_s",
    "train_runtime_s",
    "peak_memory_gib",
    "device",
    "devices",
    "path",
)
_LAST_BEFORE_FACTS = "eval_step"
# Shown in other columns, or without a value.
_SHOWN = frozenset(("kind", "model", "technique", "env", "max_steps"))


def columns() -> tuple[str, ...]:
    """Return the columns of every data frame, with those of the kinds of jobs."""
    of_kinds = [name for name, fact in facts_of_kinds().items() if fact.in_history]
    place = _COLUMNS.index(_LAST_BEFORE_FACTS) + 1
    return (*_COLUMNS[:place], *of_kinds, *_COLUMNS[place:])


def rows_of(records: Sequence[RunRecord]) -> list[dict[str, object]]:
    """Return a row per run: figures, metrics, figures of steps, and options that differ."""
    options = different_options(records)
    rows = []
    for place, record in enumerate(records):
        row = {name: figure_of(record, name) for name in columns()}
        for name, value in record.metrics.items():
            row[f"metric.{name}"] = value
        for name, value in record.step_figures.items():
            row[f"step.{name}"] = value
        for name, values in options.items():
            row[f"option.{name}"] = values[place]
        rows.append(row)
    return rows


def different_options(records: Sequence[RunRecord]) -> Mapping[str, Sequence[object]]:
    """Return the options that differ between runs, with the value of each run."""
    asked = [_asked(record) for record in records]
    # The distinct values by option, of runs that have the option.
    seen: dict[str, set[str]] = {}
    for options in asked:
        for name, value in options.items():
            if name not in _SHOWN:
                values = seen.setdefault(name, set())
                values.add(str(value))
    different = {}
    for name, values in seen.items():
        if len(values) > 1:
            different[name] = [options.get(name) for options in asked]
    return different


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
    if fact is not None and fact.in_history:
        value = record.of_kind.get(name)
        return text(value) if fact.is_word else number(value)
    if name not in _COLUMNS:
        return record.metrics.get(name, record.step_figures.get(name))
    figure: object = getattr(record, name)
    if name in ("path", "state"):
        return str(figure)
    return figure


def _asked(record: RunRecord) -> dict[str, object]:
    """Return the options of a run's job, with nested options as `outer.inner`."""
    options: dict[str, object] = {}
    spec = read_json(RunPaths(record.path).spec)
    for name, value in part(spec, "job").items():
        if not isinstance(value, dict):
            options[name] = value
        elif name != "env":
            for inner, inner_value in value.items():
                options[f"{name}.{inner}"] = inner_value
    return options
