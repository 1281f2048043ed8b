"""The runs below a folder as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from workbench.base.display_protocol import LiveDisplayable
from workbench.base.errors import RunError, check_type
from workbench.base.table import as_grid, data_frame
from workbench.client.deletion import all_but_best, delete_run
from workbench.client.run import Run
from workbench.client.tables.comparison import RunComparison, compare
from workbench.client.tables.run_rows import (
    columns,
    different_options,
    figure_of,
    jobs_of,
    rows_of,
)
from workbench.rundir.catalog.store import RunRecord
from workbench.rundir.figures.metrics import Column, columns_of
from workbench.rundir.paths import RunPaths

if TYPE_CHECKING:
    from pandas import DataFrame

    from workbench.base.table import Grid


@dataclass(frozen=True, slots=True)
class History(LiveDisplayable):
    """The runs below a folder, newest first. Shows as a table; two ticked rows are compared."""

    folder: Path
    """Searched folder, absolute."""
    records: tuple[RunRecord, ...]
    sorted_by: str = "submitted_s"
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
        for column in metric_columns(self.records):
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

    def keep_best(self, count: int, by: str = "eval_loss") -> History:
        """Delete all runs of the table but the best, and return the table of the kept runs.

        Live runs and runs without the figure are kept.

        Args:
            count: Number of runs to keep.
            by: Column of `rows()`. Losses are better if smaller; other figures if larger, unless
                the table of metrics says otherwise.

        Raises:
            ConfigError: The number is below 1, or no run has the figure.
            RunError: A run cannot be deleted. The runs before are gone.
        """
        check_type("keep_best(…)", count, int, "a number of runs")
        figures = [figure_of(record, by) for record in self.records]
        gone = all_but_best(self.records, figures, count, by)
        for path in gone:
            delete_run(RunPaths(path))
        return replace(self, records=tuple(each for each in self.records if each.path not in gone))

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


def metric_columns(records: Sequence[RunRecord]) -> list[Column]:
    metrics = [record.metrics for record in records]
    step_figures = [record.step_figures for record in records]
    return columns_of(metrics, step_figures)
