"""A table as HTML. Its styles stand in its tags: JupyterLab drops style sheets of a notebook that is not trusted."""

from __future__ import annotations

from workbench.base.table import Grid, cell_text
from workbench.display.kit.templates import render

__all__ = ["html_table"]

_PROSE = 30  # characters


def html_table(grid: Grid) -> str:
    """Draw a table as HTML."""
    return str(render("table.html", grid=grid, styles=[_style(grid, title) for title in grid.columns]))


def _style(grid: Grid, title: str) -> str:
    side = "right; font-variant-numeric: tabular-nums" if title in grid.right else "left"
    border = "border-bottom: 1px solid var(--jp-border-color2, #8884)"
    space = "; white-space: nowrap" if title in grid.whole else _least(grid, title)
    return f"text-align: {side}; padding: 2px 8px; vertical-align: top; {border}{space}"


def _least(grid: Grid, title: str) -> str:
    """Keep a column of sentences wide enough to read where the others of a table that scrolls leave it no room."""
    column = list(grid.columns).index(title)
    prose = any(len(cell_text(row[column])) > _PROSE for row in grid.rows)
    return "; min-width: 14em" if grid.whole and prose else ""
