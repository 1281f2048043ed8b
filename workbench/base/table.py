"""One table, two faces: aligned text and escaped HTML, drawn from the same cells.

Everything in a cell is foreign text: the HTML escapes it, the text strips what a terminal would obey. Colours are
JupyterLab's own variables, so the light and the dark theme both fit.
"""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.base.shown import Shown
from workbench.base.words import plain

__all__ = ["Cell", "Grid", "Marked", "facts", "html_table", "text_table"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A text of which some words are marked."""

    parts: tuple[tuple[str, bool], ...]
    """Each piece of the text and whether it is marked; a blank stands between two pieces."""


Cell = str | Marked


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid(Shown):
    """A table for people."""

    columns: Sequence[str]
    """Titles of the columns."""
    rows: Sequence[Sequence[Cell]]
    """Cells, by row and column, ready to read."""
    right: Collection[str] = ()
    """Titles of the columns that hold numbers and stand at the right."""
    whole: Collection[str] = ()
    """Titles of the columns whose cells stay on one line in HTML; where that is too wide, the table's place scrolls."""
    caption: str = ""
    """What the table shows, in a line."""


def facts(caption: str, pairs: Sequence[tuple[str, Cell]]) -> Grid:
    """Make the table of some facts, one a row."""
    return Grid(columns=("", ""), rows=pairs, caption=caption)


def text_table(grid: Grid, width: int = 60) -> str:
    """Draw a table as text.

    Example:
        >>> print(text_table(Grid(columns=("pod", "GiB"), rows=[("pod-0", "1.5"), ("a", "12")], right={"GiB"})))
        pod    GiB
        -----  ---
        pod-0  1.5
        a       12
    """
    rows = [[_wrapped(_cell_text(cell), width) for cell in row] for row in grid.rows]
    titles = [[plain(title)] for title in grid.columns]
    widths = [max(_width(line) for row in (titles, *rows) for line in row[i]) for i in range(len(titles))]
    aligned = [title in grid.right for title in grid.columns]
    lines = [plain(grid.caption)] if grid.caption else []
    if any(grid.columns):
        lines += [*_drawn(titles, widths, aligned), "  ".join("-" * w for w in widths)]
    for row in rows:
        lines += _drawn(row, widths, aligned)
    return "\n".join(lines)


def html_table(grid: Grid) -> str:
    """Draw a table as HTML; every text in it is escaped."""
    caption = f'<caption style="{_CAPTION}">{_escaped(grid.caption)}</caption>' if grid.caption else ""
    head = ""
    if any(grid.columns):
        titles = (f'<th style="{_style(grid, title)}">{_escaped(title)}</th>' for title in grid.columns)
        head = f"<thead><tr>{''.join(titles)}</tr></thead>"
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_style(grid, title)}">{_cell_html(cell)}</td>'
            for title, cell in zip(grid.columns, row, strict=True)
        )
        + "</tr>"
        for row in grid.rows
    )
    return f'<table style="{_TABLE}">{caption}{head}<tbody>{body}</tbody></table>'


_TABLE = "color: var(--jp-ui-font-color1, inherit); border-collapse: collapse; margin: 0.5em 0"
_CAPTION = "caption-side: top; text-align: left; font-weight: bold; padding: 2px 8px"
_PROSE = 30  # characters
# The ground is a pale orange in every theme, so the letters are dark in every theme.
_MARK = "background: var(--jp-warn-color3, #ffe0b2); color: #000; padding: 0 2px"


def _style(grid: Grid, title: str) -> str:
    side = "right; font-variant-numeric: tabular-nums" if title in grid.right else "left"
    border = "border-bottom: 1px solid var(--jp-border-color2, #8884)"
    space = "; white-space: nowrap" if title in grid.whole else _least(grid, title)
    return f"text-align: {side}; padding: 2px 8px; vertical-align: top; {border}{space}"


def _least(grid: Grid, title: str) -> str:
    """Keep a column of sentences wide enough to read where the others of a table that scrolls leave it no room."""
    column = list(grid.columns).index(title)
    prose = any(len(_cell_text(row[column])) > _PROSE for row in grid.rows)
    return "; min-width: 14em" if grid.whole and prose else ""


def _escaped(text: str) -> str:
    return html.escape(plain(text))


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, str):
        return _escaped(cell)
    return " ".join(f'<mark style="{_MARK}">{_escaped(t)}</mark>' if m else _escaped(t) for t, m in cell.parts)


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, str):
        return plain(cell)
    return " ".join(f"[{plain(text)}]" if marked else plain(text) for text, marked in cell.parts)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _drawn(row: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    lines = []
    for number in range(max(len(cell) for cell in row)):
        parts = []
        for cell, width, at_right in zip(row, widths, right, strict=True):
            text = cell[number] if number < len(cell) else ""
            blank = " " * (width - _width(text))
            parts.append(blank + text if at_right else text + blank)
        lines.append("  ".join(parts).rstrip())
    return lines


def _width(text: str) -> int:
    """Count the columns that a terminal gives a text: two for East Asian letters, none for combining marks."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
