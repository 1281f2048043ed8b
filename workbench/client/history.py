"""`history`: the runs below a folder, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from workbench.base.errors import RunError
from workbench.base.shown import Shown, as_grid
from workbench.client.run import Run
from workbench.rundir.catalog.store import RunRecord, find_runs, record_of
from workbench.rundir.status import is_keeper_alive

if TYPE_CHECKING:
    from workbench.base.table import Grid

__all__ = ["History", "history"]


@dataclass(frozen=True, slots=True)
class History(Shown):
    """The runs below a folder, newest first. Prints, and shows in a notebook, as a table."""

    folder: Path
    """Where they were looked for, absolute."""
    records: tuple[RunRecord, ...]

    def table(self, limit: int | None = None) -> Grid:
        """Return the table, to print or to show."""
        return as_grid(self, limit)

    @overload
    def __getitem__(self, which: int | str) -> Run: ...
    @overload
    def __getitem__(self, which: slice) -> History: ...
    def __getitem__(self, which: int | str | slice) -> Run | History:
        """Return a run by its number in the table or by the beginning of its id, or a part of the table."""
        match which:
            case slice():
                return History(self.folder, self.records[which])
            case int():
                return Run.load(self.records[which].path)
        records = [record for record in self.records if record.id.startswith(which)]
        if len(records) != 1:
            raise RunError(
                f"{len(records)} runs below {self.folder} have an id that begins with {which!r}; give more of it"
            )
        return Run.load(records[0].path)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.records)

    def __repr__(self) -> str:
        live = sum(record.is_live for record in self.records)
        return f"History({len(self.records)} runs below {self.folder}, {live} live)"


def history(folder: str | Path = ".") -> History:
    """Return all runs below a folder, newest first; `history()[0]` is the newest run itself.

    Args:
        folder: Where to look: a notebook's folder, a cluster's directory, a run's own.

    Raises:
        RunError: There is no such folder.
    """
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise RunError(f"there is no folder {root}")
    is_alive = cache(is_keeper_alive)  # clusters have many runs
    records = (record_of(paths, is_alive) for paths in find_runs(root))
    return History(root, tuple(sorted(records, key=lambda r: (-(r.submitted_s or 0.0), r.id))))
