"""Tables of runs: rows of a data frame, and the formats of the columns that are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.table import Cell, Grid, Key
from workbench.base.words import UNKNOWN, count, duration, gib, number


def text_cell(value: object) -> str:
    return "" if value is None else str(value)


WriteCell = Callable[[Any], Cell]
"""Function that returns the cell of a value. The value may be None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Format of a column of the data frame."""

    name: str
    """Name of the column."""
    title: str
    write: WriteCell = text_cell
    right: bool = False
    """Whether the column has numbers, which are aligned to the right."""
    cut: bool = False
    """Whether long cells are cut in the middle."""
    above: bool = False
    """Whether a column of equal cells may stand above the table."""


def figure(name: str, title: str, write: WriteCell, *, above: bool = False) -> Format:
    """Return the format of a column of numbers."""
    return Format(name=name, title=title, write=write, right=True, above=above)


_FIGURES = (
    figure("steps", "steps", count),
    figure("train_loss", "train loss", number),
    figure("first_eval_loss", "eval loss before", number),
    figure("eval_loss", "eval loss", number),
    figure("eval_step", "at step", count),
    figure("train_samples_per_s", "samples/s", number),
    figure("peak_memory_gib", "peak memory", gib),
    figure("duration_s", "duration", duration),
    figure("gpu_hours", "GPU-hours", number),
    figure("pod_hours", "pod-hours", number),
    figure("pods", "pods", count, above=True),
)
FIGURES: Mapping[str, Format] = {each.name: each for each in _FIGURES}
"""Formats of figures that every table of runs shows alike, by column."""


def grid_of(
    rows: Sequence[Mapping[str, object]],
    formats: Sequence[Format],
    *,
    caption: str,
    stay: Sequence[str],
    sorts: bool = False,
) -> Grid:
    """Return rows of a data frame as a table. Columns without any value are left out."""
    shown = []
    cells = []
    keys = []
    for each in formats:
        values = [row.get(each.name) for row in rows]
        written = [each.write(value) for value in values]
        if any(cell not in ("", UNKNOWN) for cell in written):
            shown.append(each)
            cells.append(written)
            keys.append([_key(value) for value in values])
    return Grid(
        columns=[each.title for each in shown],
        rows=list(zip(*cells, strict=True)),
        keys=list(zip(*keys, strict=True)) if sorts else (),
        right={each.title for each in shown if each.right},
        whole=[each.title for each in shown],
        cut={each.title for each in shown if each.cut},
        caption=caption,
        stay=stay,
    )


def _key(value: object) -> Key:
    if value is None or value == "":
        return None
    return value if isinstance(value, int | float) else str(value)
