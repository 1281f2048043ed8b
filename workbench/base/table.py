"""A table for people and its text, without control characters; records as a `DataFrame`."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.base.errors import ConfigError
from workbench.base.shown import Shown, no_view, view
from workbench.base.words import counted, middle_cut, plain

if TYPE_CHECKING:
    from functools import _SingleDispatchCallable

    from pandas import DataFrame


@dataclass(frozen=True, slots=True)
class Marked:
    parts: tuple[tuple[str, bool], ...]
    """Pieces of the text with their marks, joined by blanks."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stack of parts against a limit, drawn as long as its share of the column's width."""

    parts: tuple[tuple[str, float], ...]
    """Parts with their share of the width; any excess is cut."""
    limit: float | None = None
    """Share at which the limit is drawn."""
    words: str = ""
    """The bar in words, for readers who cannot see it."""


Cell = str | Marked | Bar
_BAR = 24  # letters
Key = float | str | None
"""Sort key of a cell; None is unknown and sorted last in both directions."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Grid(Shown):
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Collection[str] = ()
    """Titles of the number columns, which are aligned to the right."""
    whole: Collection[str] = ()
    """Titles of columns with unbroken cells in HTML; a wide table scrolls."""
    caption: str = ""
    cut: Collection[str] = ()
    """Titles of the columns whose long cells are cut in the middle; in HTML a title holds the
    whole."""
    keys: Sequence[Sequence[Key]] = ()
    """Sort keys by row and column, for clicks on titles in HTML; empty: titles do not sort."""

    def __repr__(self) -> str:
        titles = ", ".join(filter(None, self.columns)) or self.caption
        return plain(f"Grid({counted(len(self.rows), 'row')}{': ' if titles else ''}{titles})")


as_grid: _SingleDispatchCallable[Grid] = view(no_view)
"""Return a record as a table, of at most `limit` rows."""


def facts(caption: str, pairs: Sequence[tuple[str, Cell]]) -> Grid:
    """Make a table of facts, a fact per row."""
    return Grid(columns=("", ""), rows=pairs, caption=caption)


def text_table(grid: Grid, width: int = 60) -> str:
    """Draw a table as text.

    Example:
        >>> rows = [("pod-0", "1.5"), ("a", "12")]
        >>> print(text_table(Grid(columns=("pod", "GiB"), rows=rows, right={"GiB"})))
        pod    GiB
        -----  ---
        pod-0  1.5
        a       12
    """
    cut = [title in grid.cut for title in grid.columns]
    wrap = textwrap.TextWrapper(width, break_on_hyphens=False).wrap
    rows = [
        [wrap(cell_text(cell, cut[n])) or [""] for n, cell in enumerate(row)] for row in grid.rows
    ]
    titles = [[plain(title)] for title in grid.columns]
    widths = [
        max(_width(line) for row in (titles, *rows) for line in row[i]) for i in range(len(titles))
    ]
    aligned = [title in grid.right for title in grid.columns]
    lines = [plain(grid.caption)] if grid.caption else []
    if any(grid.columns):
        lines += [*_drawn(titles, widths, aligned), "  ".join("-" * w for w in widths)]
    for row in rows:
        lines += _drawn(row, widths, aligned)
    if parts := bar_parts(grid):
        lines.append(", ".join(f"{name[:1]} {name}" for name in parts))
    return "\n".join(lines)


def bar_parts(grid: Grid) -> list[str]:
    """Return the parts of a table's bars, without duplicates."""
    bars = [cell for row in grid.rows for cell in row if isinstance(cell, Bar)]
    return list(dict.fromkeys(name for bar in bars for name, share in bar.parts if share > 0))


def cell_text(cell: Cell, cut: bool = False) -> str:
    """Write a cell on one line, maybe cut in the middle; marked words stand in brackets."""
    match cell:
        case Marked(parts):
            return " ".join(f"[{plain(text)}]" if marked else plain(text) for text, marked in parts)
        case Bar():
            return _bar_text(cell)
    return middle_cut(plain(cell)) if cut else plain(cell)


def _bar_text(bar: Bar) -> str:
    """Draw a bar with a letter per part."""
    drawn = ""
    reached = 0.0
    for name, share in bar.parts:
        reached = min(1.0, reached + share)
        drawn += name[:1] * (round(reached * _BAR) - len(drawn))
    drawn = f"{drawn:.<{_BAR}}"
    if bar.limit is None:
        return drawn
    at = round(min(1.0, bar.limit) * _BAR)
    return f"{drawn[:at]}|{drawn[at:]}"


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
    """Return a text's columns in a terminal: two per East Asian letter, none per combining mark."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def data_frame(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> DataFrame:
    """Return a table with a row per mapping. `columns` come first, even if no row has them."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ConfigError(
            "to_dataframe needs pandas, which is not installed here: pip install pandas"
        ) from error
    given = list(rows)
    return DataFrame(
        given, columns=list(dict.fromkeys([*columns, *(name for row in given for name in row)]))
    )
