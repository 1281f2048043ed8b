"""Long lists of ranks, GPUs and pods: rows far from the median first, the others counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from workbench.base.table import Grid, cell_text

MOST = 16
"""Rows of ranks, GPUs or pods that a view shows in full."""


def split(columns: Sequence[Sequence[float | None]], most: int = MOST) -> tuple[list[int], range]:
    """Return all rows in the order to show them, and the part of that order to leave out.

    At most `most` rows keep their order, and none is left out. Of more rows, those come first that
    differ most from the median of any column, relative to the largest value of the column.

    Example:
        >>> order, rest = split([[1.0, 1.0, 5.0, 1.1, 1.0]], most=2)
        >>> order[:2], list(rest)
        ([2, 3], [2, 3, 4])
    """
    count = max((len(column) for column in columns), default=0)
    order = list(range(count))
    if count <= most:
        return order, range(0)
    distances = [0.0] * count
    for column in columns:
        known = [value for value in column if value is not None]
        if not known:
            continue
        usual = median(known)
        largest = max(abs(value) for value in known) or 1.0
        for row, value in enumerate(column):
            if value is not None:
                distances[row] = max(distances[row], abs(value - usual) / largest)
    order.sort(key=lambda row: distances[row], reverse=True)
    return order, range(most, count)


def with_outliers(grid: Grid, numbers: Mapping[str, Sequence[float | None]]) -> Grid:
    """Shorten a long table. The last row counts the rows left out, with the range of each column.

    Args:
        grid: The table with all rows.
        numbers: Values by title of the columns by which rows are compared.
    """
    order, left_out = split(list(numbers.values()))
    if not left_out:
        return grid
    rows = [grid.rows[row] for row in order[: left_out.start]]
    rest = [order[place] for place in left_out]
    last = [f"and {len(rest)} more", *[""] * (len(grid.columns) - 1)]
    for place, title in enumerate(grid.columns):
        if place and title in numbers:
            last[place] = between(
                numbers[title], rest, [cell_text(row[place]) for row in grid.rows]
            )
    return replace(grid, rows=[*rows, last], caption=f"{grid.caption}, the most different first")


def between(values: Sequence[float | None], rows: Sequence[int], texts: Sequence[str]) -> str:
    """Return the texts of the lowest and the highest value of some rows; "" without a value."""
    known = sorted((value, texts[row]) for row in rows if (value := values[row]) is not None)
    if not known:
        return ""
    lowest = known[0][1]
    highest = known[-1][1]
    return lowest if lowest == highest else f"{lowest} to {highest}"
