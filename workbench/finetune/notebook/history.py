"""`history`: find the runs below a folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import get_args

from workbench.base.errors import ConfigError, RunError, check_type, one_of
from workbench.base.files import is_folder, user_path
from workbench.client.tables.history import History, metric_columns
from workbench.client.tables.run_rows import columns, figure_of
from workbench.finetune.techniques.registry import TechniqueName
from workbench.jobs.registry import kinds
from workbench.rundir.catalog.find import find_runs
from workbench.rundir.catalog.store import RunRecord, record_of
from workbench.rundir.state import RunState, StateName

_NEWEST = "-submitted_s"


def history(
    folder: str | Path = ".",
    *,
    name: str = "",
    state: StateName | Sequence[StateName] = (),
    model: str = "",
    technique: TechniqueName | str | Sequence[TechniqueName | str] = (),
    pods: int | None = None,
    within: Mapping[str, tuple[float | None, float | None]] | None = None,
    sort: str = _NEWEST,
) -> History:
    """Return the runs below a folder, newest first; `history()[0]` is the newest run itself.

    Args:
        folder: Folder to search: a notebook's folder, a cluster's or a run's directory.
        name: Text in the name, note, tags or id of the runs, ignoring case.
        state: State of the runs, or several states.
        model: Text in the name of the runs' models.
        technique: Technique of the runs, or several techniques. Runs of another kind of job have
            the name of their kind, such as `script`.
        pods: Number of pods of the runs.
        within: Least and greatest value by the name of a numeric column, of a metric or of a figure
            of the steps, as in `{"eval_loss": (None, 0.5)}`. None for no bound. Runs without a
            value are left out. A run with both a metric and a figure of the steps of the name has
            the metric; `metric.NAME` and `step.NAME` choose one of them.
        sort: Column of `to_dataframe` to sort by, except options; also the name of a metric or of
            a figure of the steps, such as `rougeL`. A leading minus sorts the largest first.

    Raises:
        RunError: There is no such folder.
        ConfigError: There is no such state or technique, no run below the folder has such a column,
            or `within` names a column of text or a value other than a pair of numbers.
    """
    check_type("history", folder, (str, PathLike), "the path of a folder")
    check_type("history(sort=…)", sort, str, "the name of a column")
    check_type("history(state=…)", state, (str, Sequence), "a state or a list of states")
    check_type("history(technique=…)", technique, (str, Sequence), "a technique or a list")
    check_type("history(within=…)", within or {}, Mapping, "an object of names to pairs")
    root = user_path(folder).absolute()
    if not is_folder(root):
        raise RunError(f"there is no folder {root}")
    # A single word is a list of one.
    states, techniques = ([each] if isinstance(each, str) else each for each in (state, technique))
    for each in states:
        if each not in list(RunState):
            raise one_of("state", each, list(RunState))
    keepers: dict[Path, bool] = {}
    found = [record_of(paths, keepers) for paths in find_runs(root)]
    # A kind of another package may have techniques of its own, known from its runs alone.
    known = (*get_args(TechniqueName), *kinds(), *(record.technique for record in found))
    for each in techniques:
        if each not in known:
            raise one_of("technique", each, known)
    # Columns of metrics are known only from the runs, so they are checked after the search.
    column = _column_of("sort", sort.removeprefix("-"), found)
    bounds = {}
    for bounded, pair in (within or {}).items():
        key = _column_of("within", bounded, found)
        bounds[key] = _bounds(bounded, pair)
        if any(isinstance(figure_of(record, key), str) for record in found):
            raise ConfigError(
                f"within[{bounded!r}] names a column of text; name a column of numbers"
            )
    # A run is kept if it passes every filter that was given.
    records = [
        record
        for record in found
        if all(_is_within(record, each, bounds[each]) for each in bounds)
        and (not states or record.state in states)
        and (not techniques or record.technique in techniques)
        and (pods is None or record.pods == pods)
        and model.lower() in record.model.lower()
        and name.lower() in "\n".join(_words(record)).lower()
    ]
    in_order = _sorted(records, column, largest_first=sort.startswith("-"))
    return History(root, tuple(in_order), sorted_by=column)


def _column_of(option: str, name: str, records: Sequence[RunRecord]) -> str:
    """Return the column of `to_dataframe` for its name or the name of a metric."""
    if name in columns():
        return name
    keys = [column.key for column in metric_columns(records)]
    # Each run has the metric, else the figure of the steps.
    if f"metric.{name}" in keys and f"step.{name}" in keys:
        return name
    for key in (name, f"metric.{name}", f"metric.{name.removeprefix('eval_')}", f"step.{name}"):
        if key in keys:
            return key
    raise one_of(option, name, [*columns(), *keys])


def _bounds(name: str, pair: object) -> tuple[float, float]:
    """Return the least and the greatest value; no bound is infinite."""
    match pair:
        case (int() | float() | None as least, int() | float() | None as most):
            low = -math.inf if least is None else float(least)
            high = math.inf if most is None else float(most)
            if low <= high:
                return low, high
    raise ConfigError(
        f"within[{name!r}] is {pair!r}; give the least and the greatest value, as in (None, 0.5)"
    )


def _is_within(record: RunRecord, column: str, bounds: tuple[float, float]) -> bool:
    value = figure_of(record, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return bounds[0] <= value <= bounds[1]


def _sorted(records: Sequence[RunRecord], column: str, *, largest_first: bool) -> list[RunRecord]:
    by_id = sorted(records, key=lambda record: record.id)
    there = [record for record in by_id if figure_of(record, column) is not None]
    there.sort(key=lambda record: _key(figure_of(record, column)), reverse=largest_first)
    # Runs without a value come last in either direction.
    unknown = [record for record in by_id if figure_of(record, column) is None]
    return there + unknown


def _key(value: object) -> tuple[float, str]:
    if isinstance(value, int | float):
        return float(value), ""
    return 0.0, str(value)


def _words(record: RunRecord) -> Sequence[str]:
    return record.name, record.note, record.id, *record.tags
