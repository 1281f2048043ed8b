"""A table for people and its text, without control characters; records as a `DataFrame`."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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


@dataclass(frozen=True, slots=True)
class Toned:
    """A text in the colour of a state."""

    text: str
    tone: Literal["good", "bad", "warn", "busy", "quiet"]


Cell = str | Marked | Bar | Toned
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
        content = counted(len(self.rows), "row")
        titles = ", ".join(filter(None, self.columns)) or self.caption
        if titles:
            content += f": {titles}"
        return plain(f"Grid({content})")


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
    # A row is a list of cells, and a cell a list of lines.
    rows = []
    for row in grid.rows:
        cells = []
        for number, cell in enumerate(row):
            text = cell_text(cell, cut[number])
            cells.append(wrap(text) or [""])
        rows.append(cells)
    titles = [[plain(title)] for title in grid.columns]
    # A column is as wide as its widest line.
    widths = []
    for number in range(len(titles)):
        cells_below = [cells[number] for cells in (titles, *rows)]
        widths.append(max(_width(line) for cell_lines in cells_below for line in cell_lines))
    aligned = [title in grid.right for title in grid.columns]
    lines = []
    if grid.caption:
        lines.append(plain(grid.caption))
    if any(grid.columns):
        lines += _drawn(titles, widths, aligned)
        lines.append("  ".join("-" * width for width in widths))
    for cells in rows:
        lines += _drawn(cells, widths, aligned)
    parts = bar_parts(grid)
    if parts:
        lines.append(", ".join(f"{name[:1]} {name}" for name in parts))
    return "\n".join(lines)


def bar_parts(grid: Grid) -> list[str]:
    """Return the parts of a table's bars, without duplicates."""
    names: dict[str, None] = {}
    for row in grid.rows:
        for cell in row:
            if isinstance(cell, Bar):
                names |= {name: None for name, share in cell.parts if share > 0}
    return list(names)


def cell_text(cell: Cell, cut: bool = False) -> str:
    """Write a cell on one line, maybe cut in the middle; marked words stand in brackets."""
    match cell:
        case Marked(parts):
            words = []
            for text, marked in parts:
                shown = plain(text)
                words.append(f"[{shown}]" if marked else shown)
            return " ".join(words)
        case Bar():
            return _bar_text(cell)
        case Toned():
            return plain(cell.text)
    shown = plain(cell)
    return middle_cut(shown) if cut else shown


def _bar_text(bar: Bar) -> str:
    """Draw a bar with a letter per part."""
    drawn = ""
    reached = 0.0
    for name, share in bar.parts:
        reached = min(1.0, reached + share)
        end = round(reached * _BAR)
        drawn += name[:1] * (end - len(drawn))
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
    columns = 0
    for letter in text:
        if unicodedata.combining(letter):
            continue
        is_wide = unicodedata.east_asian_width(letter) in "WF"
        columns += 2 if is_wide else 1
    return columns


def data_frame(rows: Iterable[Mapping[str, object]], columns: Sequence[str] = ()) -> DataFrame:
    """Return a table with a row per mapping. `columns` come first, even if no row has them."""
    try:
        from pandas import DataFrame
    except ImportError as error:
        raise ConfigError(
            "to_dataframe needs pandas, which is not installed here: pip install pandas"
        ) from error
    given = list(rows)
    names = dict.fromkeys(columns)
    for row in given:
        names.update(dict.fromkeys(row))
    return DataFrame(given, columns=list(names))
