"""`history`: the runs below a folder, newest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, overload

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import ConfigError, RunError, check_type, one_of
from workbench.base.files import is_folder, user_path
from workbench.base.table import as_grid, data_frame
from workbench.client.run import Run
from workbench.client.tables.comparison import RunComparison, compare
from workbench.client.tables.run_rows import columns, different_options, figure_of, jobs_of, rows_of
from workbench.rundir.catalog.store import RunRecord, find_runs, record_of
from workbench.rundir.figures.metrics import Column, columns_of
from workbench.rundir.state import RunState, StateName
from workbench.rundir.status import is_keeper_alive

if TYPE_CHECKING:
    from pandas import DataFrame

    from workbench.base.table import Grid

_NEWEST = "-submitted_s"


@dataclass(frozen=True, slots=True)
class History(LiveDisplayable):
    """The runs below a folder, newest first. Shows as a table; two ticked rows are compared."""

    folder: Path
    """Searched folder, absolute."""
    records: tuple[RunRecord, ...]
    sorted_by: str = _NEWEST.removeprefix("-")
    """Column of `to_dataframe` that the runs are sorted by."""

    def table(self, limit: int | None = None) -> Grid:
        """Return the table, to print or to show."""
        return as_grid(self, limit)

    def to_dataframe(self) -> DataFrame:
        """Return the runs as a pandas DataFrame, a run per row, with units in the column names.

        Columns are fields of the result; `peak_memory_gib` is the highest of all pods. Further
        columns are `metric.NAME` for a metric of the last evaluation, `step.NAME` for the last
        value of a figure that the steps report, and `option.NAME` for an option that differs.
        """
        return data_frame(self.rows(), columns())

    def rows(self) -> list[dict[str, object]]:
        """Return the rows of `to_dataframe` as mappings, without pandas."""
        return rows_of(self.records)

    def metrics(self) -> list[Column]:
        """Return the columns of the table for metrics that are no field of the result.

        The columns are metrics with a row in `rundir/figures/metrics.py`, and the column to
        sort by.
        """
        shown = []
        for column in _metric_columns(self.records):
            is_in_tables = column.is_known and column.in_tables
            figure = column.key.partition(".")[2]
            if is_in_tables or self.sorted_by in (column.key, figure):
                shown.append(column)
        return shown

    def options(self) -> Mapping[str, Sequence[object]]:
        """Return the options that differ between the runs, with values in the order of the table.

        A value is None for a run without the option. `dataset.path` is the `path` within `dataset`.
        """
        return different_options(jobs_of(self.records))

    def compare(self, *which: int | str) -> RunComparison:
        """Compare some of the runs, as `workbench.compare` does.

        Args:
            which: Numbers in the table, names, or beginnings of ids. Default: all runs.
        """
        chosen = [self._record(each) for each in which]
        return compare(chosen or list(self.records))

    @overload
    def __getitem__(self, which: int | str) -> Run: ...
    @overload
    def __getitem__(self, which: slice) -> History: ...
    def __getitem__(self, which: int | str | slice) -> Run | History:
        """Return a run by number, name or beginning of its id; for a slice a part of the table."""
        if isinstance(which, slice):
            return replace(self, records=self.records[which])
        return Run.load(self._record(which).path)

    def _record(self, which: int | str) -> RunRecord:
        if isinstance(which, int):
            return self.records[which]
        records = [record for record in self.records if record.name == which]
        if not records:
            records = [record for record in self.records if record.id.startswith(which)]
        if len(records) != 1:
            raise RunError(
                f"{len(records)} runs below {self.folder} are called "
                f"{which!r} or have an id that begins so; give more of it"
            )
        return records[0]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        live = sum(record.is_live for record in self.records)
        return f"History({len(self.records)} runs below {self.folder}, {live} live)"


def history(
    folder: str | Path = ".",
    *,
    name: str = "",
    state: StateName | Sequence[StateName] = (),
    model: str = "",
    technique: str | Sequence[str] = (),
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
        technique: Technique of the runs, or several techniques.
        pods: Number of pods of the runs.
        within: Least and greatest value by the name of a numeric column, of a metric or of a figure
            of the steps, as in `{"eval_loss": (None, 0.5)}`. None for no bound. Runs without a
            value are left out. A run with both a metric and a figure of the steps of the name has
            the metric; `metric.NAME` and `step.NAME` choose one of them.
        sort: Column of `to_dataframe` to sort by, except options; also the name of a metric or of
            a figure of the steps, such as `rougeL`. A leading minus sorts the largest first.

    Raises:
        RunError: There is no such folder.
        ConfigError: There is no such state, no run below the folder has such a column, or `within`
            names a column of text or a value other than a pair of numbers.
    """
    check_type("history", folder, (str, PathLike), "the path of a folder")
    check_type("history(sort=…)", sort, str, "the name of a column")
    check_type("history(state=…)", state, (str, Sequence), "a state or a list of states")
    check_type("history(within=…)", within or {}, Mapping, "an object of names to pairs")
    root = user_path(folder).absolute()
    if not is_folder(root):
        raise RunError(f"there is no folder {root}")
    # A single word is a list of one.
    states, techniques = ([each] if isinstance(each, str) else each for each in (state, technique))
    for each in states:
        if each not in list(RunState):
            raise one_of("state", each, list(RunState))
    is_alive = cache(is_keeper_alive)  # clusters have many runs
    found = [record_of(paths, is_alive) for paths in find_runs(root)]
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
    keys = [column.key for column in _metric_columns(records)]
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


def _metric_columns(records: Sequence[RunRecord]) -> list[Column]:
    metrics = [record.metrics for record in records]
    step_figures = [record.step_figures for record in records]
    return columns_of(metrics, step_figures)


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
