"""`BenchmarkResult`: the rows of a benchmark, with what they may be compared with, and its pictures and report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.base.json_values import part
from workbench.base.shown import Shown, ShownLive
from workbench.base.table import data_frame
from workbench.benchmark.comparable_groups import Group, groups
from workbench.benchmark.grid import LeftOut
from workbench.benchmark.row import BenchmarkRow, Outcome

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult(Shown):
    """The rows of a benchmark. Prints, and shows in a notebook, as its table with the published figures beside it."""

    name: str
    folder: Path
    """Where its run directories are, absolute."""
    rows: tuple[BenchmarkRow, ...]
    """One a run, in the order of the grid, whatever became of it."""
    left_out: tuple[LeftOut, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The rows that may be compared, together; repeats folded, speed-up and efficiency filled."""
        return groups(self.rows)

    def to_dataframe(self) -> DataFrame:
        """Return the rows as a pandas DataFrame, one a run, with the units in the names of the columns.

        Columns are the fields of `BenchmarkRow`, `device`, `devices`, `seed` and `commit`, and `option.NAME` for each
        option of the job in which rows differ. `speed_up`, `efficiency` and
        `predicted_samples_per_s` are those of the row's repeats together.
        """
        folded = {id(row): summary.row for group in self.groups for summary in group.summaries for row in summary.rows}
        jobs = [part(row.spec, "job") for row in self.rows]
        varied = [name for job in jobs[:1] for name in job if len({str(other.get(name)) for other in jobs}) > 1]
        rows = []
        for row, job in zip(self.rows, jobs, strict=True):
            its = folded[id(row)]
            compared = {name: getattr(its, name) for name in ("speed_up", "efficiency", "predicted_samples_per_s")}
            facts = {**row.to_dict(), **compared}
            facts = {name: value for name, value in facts.items() if name not in ("spec", "provenance", "scaling")}
            facts |= {name: getattr(row.provenance, name) for name in ("device", "devices", "seed", "commit")}
            rows.append(facts | {f"option.{name}": job.get(name) for name in varied})
        return data_frame(rows)

    @property
    def from_disk(self) -> tuple[BenchmarkRow, ...]:
        """The rows that were found finished instead of run."""
        return tuple(row for row in self.rows if row.from_disk)

    def report(self, folder: str | Path | None = None) -> Path:
        """Write `report.html` and `report.md`, which need no network."""
        from workbench.benchmark.report import write_report

        return write_report(self.rows, Path(folder or self.folder))[0]

    def plots(self) -> BenchmarkPlots:
        """Return scaling, memory and losses as pictures; a cell that ends with it shows them."""
        return BenchmarkPlots(self)

    def __add__(self, other: BenchmarkResult) -> BenchmarkResult:
        """Put the rows of another benchmark behind these; of a row that is in both, the other's is kept."""
        places = {(row.key, row.repeat) for row in other.rows}
        mine = tuple(row for row in self.rows if (row.key, row.repeat) not in places)
        return replace(self, rows=mine + other.rows, left_out=self.left_out + other.left_out)

    def __repr__(self) -> str:
        counts = {outcome: sum(row.outcome is outcome for row in self.rows) for outcome in Outcome}
        ends = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
        return f"BenchmarkResult({self.name}: {len(self.rows)} rows, {ends}; {len(self.from_disk)} from disk)"


@dataclass(frozen=True, slots=True)
class BenchmarkPlots(ShownLive):
    """The pictures of a benchmark. Shows in a notebook; as text it says where they can be seen."""

    result: BenchmarkResult
