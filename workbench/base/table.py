"""A table for people, and its text; what a terminal would obey is taken out of every cell."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from workbench.base.shown import Shown
from workbench.base.words import plain

__all__ = ["Cell", "Grid", "Marked", "cell_text", "facts", "text_table"]


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
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    """Titles of the columns that hold numbers and stand at the right."""
    whole: Collection[str] = ()
    """Titles of the columns whose cells stay on one line in HTML; where that is too wide, the table's place scrolls."""
    caption: str = ""


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
    rows = [[_wrapped(cell_text(cell), width) for cell in row] for row in grid.rows]
    titles = [[plain(title)] for title in grid.columns]
    widths = [max(_width(line) for row in (titles, *rows) for line in row[i]) for i in range(len(titles))]
    aligned = [title in grid.right for title in grid.columns]
    lines = [plain(grid.caption)] if grid.caption else []
    if any(grid.columns):
        lines += [*_drawn(titles, widths, aligned), "  ".join("-" * w for w in widths)]
    for row in rows:
        lines += _drawn(row, widths, aligned)
    return "\n".join(lines)


def cell_text(cell: Cell) -> str:
    """Write a cell on one line; marked words stand in brackets."""
    match cell:
        case Marked(parts):
            return " ".join(f"[{plain(text)}]" if marked else plain(text) for text, marked in parts)
    return plain(cell)


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
