"""A table as HTML. Its styles stand in its tags: JupyterLab drops style sheets of a notebook that is not trusted."""

from __future__ import annotations

from workbench.base.table import Grid, bar_parts, cell_text
from workbench.display.kit.plots.figure import COLOURS
from workbench.display.kit.templates import render

_PROSE = 30  # letters of a cell
_WORD = 40  # letters of a word


def html_table(grid: Grid) -> str:
    prose = _prose(grid) if grid.whole else []
    styles = [_style(grid, title, 90 // len(prose) if title in prose else 0) for title in grid.columns]
    cut = [title in grid.cut for title in grid.columns]
    bars = dict(zip(bar_parts(grid), COLOURS, strict=False))
    return str(render("table.html", grid=grid, styles=styles, cut=cut, bars=bars))


def _style(grid: Grid, title: str, share: int) -> str:
    side = "right; font-variant-numeric: tabular-nums" if title in grid.right else "left"
    border = "border-bottom: 1px solid var(--jp-border-color2, #8884)"
    space = (
        "; white-space: nowrap"
        if title in grid.whole or title in grid.right
        else _breaks(grid, title) + _lines(grid, title)
    )
    # Sentences share what room there is, however long one of them is, and stay wide enough to read in a table that
    # scrolls.
    wide = f"; min-width: 14em; width: {share}%" if share else ""
    return f"text-align: {side}; padding: 2px 8px; vertical-align: top; {border}{space}{wide}"


def _breaks(grid: Grid, title: str) -> str:
    """Break no word but one that no screen has room for, such as a path."""
    words = [word for text in _texts(grid, title) for word in text.split()]
    return f"; overflow-wrap: {'anywhere' if any(len(word) > _WORD for word in words) else 'break-word'}"


def _texts(grid: Grid, title: str) -> list[str]:
    place = list(grid.columns).index(title)
    return [cell_text(row[place]) for row in grid.rows]


def _prose(grid: Grid) -> list[str]:
    loose = [title for title in grid.columns if title not in grid.whole]
    return [title for title in loose if any(len(text) > _PROSE for text in _texts(grid, title))]


def _lines(grid: Grid, title: str) -> str:
    """Keep the line breaks of a column of plain texts, such as code or what a model wrote."""
    cells = [row[list(grid.columns).index(title)] for row in grid.rows]
    texts = [cell for cell in cells if isinstance(cell, str)]
    return "; white-space: pre-wrap" if len(texts) == len(cells) and any("\n" in text for text in texts) else ""
