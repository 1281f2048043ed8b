"""Columns of equal cells as a line above a table, so that narrow places show what differs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from workbench.base.table import Grid, cell_text
from workbench.base.words import UNKNOWN


def without_equal(grid: Grid, titles: Collection[str], *, least: int = 2) -> tuple[Grid, list[str]]:
    """Take those of the columns out whose cells are all equal, and return them as facts.

    A table of fewer rows than `least` stays whole. Sort keys are not supported.

    Example:
        >>> rows = [("pod-0", "2.13"), ("pod-1", "2.13")]
        >>> without_equal(Grid(columns=("pod", "torch"), rows=rows), {"torch"})
        (Grid(2 rows: pod), ['torch 2.13'])
    """
    if len(grid.rows) < least or not grid.rows:
        return grid, []
    kept = []
    facts = []
    for place, title in enumerate(grid.columns):
        texts = {cell_text(row[place]) for row in grid.rows}
        if title not in titles or len(texts) > 1:
            kept.append(place)
            continue
        [text] = texts
        if text not in ("", UNKNOWN):
            facts.append(f"{title} {text}")
    left = replace(
        grid,
        columns=[grid.columns[place] for place in kept],
        rows=[[row[place] for place in kept] for row in grid.rows],
    )
    return left, facts
