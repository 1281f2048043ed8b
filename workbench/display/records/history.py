"""The runs below a folder for the eye: a table, newest first, live ones marked."""

from __future__ import annotations

import time
from pathlib import Path

from workbench.base.table import Cell, Grid, Marked
from workbench.base.words import UNKNOWN, count, number, percent
from workbench.client.history import History
from workbench.display.kit.doc import Doc, Table
from workbench.rundir.catalog.store import RunRecord

__all__ = ["history_doc", "history_grid"]

_RUNS = 50
_COLUMNS = (
    "#", "run", "when", "state", "model", "technique", "pods", "steps", "eval loss", "exact match", "samples/s",
    "folder",
)  # fmt: skip
_RIGHT = ("#", "pods", "steps", "eval loss", "exact match", "samples/s")


def history_doc(history: History) -> Doc:
    """State the newest runs."""
    return Doc(blocks=[Table(history_grid(history, _RUNS), width=80)], full=True)


def history_grid(history: History, limit: int | None = None) -> Grid:
    """Return the runs as a table."""
    records = history.records[:limit]
    live = sum(record.is_live for record in history.records)
    runs = f"{count(len(history))} {'run' if len(history) == 1 else 'runs'} below {history.folder}"
    shown = f"; the newest {count(limit)} shown" if len(records) < len(history) else ""
    return Grid(
        columns=_COLUMNS,
        rows=[_row(n, record, history.folder) for n, record in enumerate(records)],
        right=_RIGHT,
        whole=_COLUMNS[:-1],
        caption=f"{runs}, {count(live)} live{shown}" if live else runs + shown,
    )


def _row(place: int, record: RunRecord, folder: Path) -> list[Cell]:
    state = Marked(((f"● {record.state}", True),)) if record.is_live else str(record.state)
    # A run's own folder has its id for a name, unless somebody chose another.
    place_of = record.path.parent if record.path.name == record.id else record.path
    near = place_of.relative_to(folder) if place_of.is_relative_to(folder) else place_of
    return [
        str(place), record.id, _when(record.submitted_s), state, record.model, record.technique, count(record.pods),
        count(record.steps), number(record.eval_loss), percent(record.exact_match),
        number(record.train_samples_per_s), str(near),
    ]  # fmt: skip


def _when(seconds: float | None) -> str:
    try:
        return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time that can be
        return UNKNOWN
