"""A table for people and its text, without control characters; records as a `DataFrame`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Literal, TextIO

from workbench.base.display_protocol import Displayable, no_view, view
from workbench.base.errors import ConfigError
from workbench.base.words import middle_cut, pluralize, strip_controls

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
class Spark:
    """A small curve, without axes."""

    values: tuple[float, ...]
    """Values at equal distances, at least two."""

    @property
    def heights(self) -> list[float]:
        """Values as shares of their range, 0 to 1."""
        lowest = min(self.values)
        span = max(self.values) - lowest
        return [(value - lowest) / span if span else 0.5 for value in self.values]


Tone = Literal["good", "bad", "warn", "busy", "quiet", ""]


@dataclass(frozen=True, slots=True)
class Toned:
    """A text in the colour of a state."""

    text: str
    tone: Tone = ""
    """The state. Empty: no colour."""
    beneath: str = ""
    """Small text in a line below."""


Cell = str | Marked | Bar | Spark | Toned
DONE = "#"
"""Name of the part of a bar that is progress."""
_BAR = 24  # letters
_BLOCKS = "▁▂▃▄▅▆▇█"
_BETWEEN = "  "
_COLOURS = {"succeeded": 32, "failed": 31, "lost": 31, "refused": 31, "running": 36}
_STATE = re.compile(r"(?:\b|(?<=\x1b\[K))(?:succeeded|failed|lost|refused|running)\b")
_ROOM = 150  # columns of a text outside of a terminal, such as the text of a notebook's output
Key = float | str | None
"""Sort key of a cell; None is unknown and sorted last in both directions."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Grid(Displayable):
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
    stay: Collection[str] = ()
    """Titles of the first columns, which name and judge a row.

    They stay in sight while a page scrolls sideways. Columns without room continue in a further
    table, which repeats them. Empty: in text, the first column is repeated.
    """
    under: Sequence[Cell] = ()
    """Text below each row, across all columns. Empty: no row has any."""

    def __repr__(self) -> str:
        content = pluralize(len(self.rows), "row")
        titles = ", ".join(filter(None, self.columns)) or self.caption
        if titles:
            content += f": {titles}"
        return strip_controls(f"Grid({content})")


as_grid: _SingleDispatchCallable[Grid] = view(no_view)
"""Return a record as a table, of at most `limit` rows."""


def facts(caption: str, pairs: Sequence[tuple[str, Cell]]) -> Grid:
    """Make a table of facts, a fact per row."""
    return Grid(columns=("", ""), rows=pairs, caption=caption)


def room_of_text() -> int:
    """Return the columns of the terminal, or those of a text outside of a terminal."""
    # COLUMNS alone says nothing: Python's readline sets it to 80 in a process without a terminal.
    is_terminal = sys.__stdout__ is not None and sys.__stdout__.isatty()
    return get_terminal_size().columns if is_terminal else _ROOM


def coloured(text: str, stream: TextIO) -> str:
    """Return a text with coloured states for a terminal; unchanged for a file, and by NO_COLOR."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return _STATE.sub(lambda at: f"\x1b[{_COLOURS[at[0]]}m{at[0]}\x1b[0m", text)


def text_table(grid: Grid, width: int = 60) -> str:
    """Draw a table as text, with cells of at most `width` letters.

    A table too wide for the terminal continues in further tables with the same rows.

    Example:
        >>> rows = [("pod-0", "1.5"), ("a", "12")]
        >>> print(text_table(Grid(columns=("pod", "GiB"), rows=rows, right={"GiB"})))
        pod    GiB
        -----  ---
        pod-0  1.5
        a       12
    """
    room = room_of_text()
    titles = [strip_controls(title) for title in grid.columns]
    cut = [title in grid.cut for title in grid.columns]
    texts = []
    for row in grid.rows:
        texts.append([_parts_of(cell, cut[number]) for number, cell in enumerate(row)])
    # A column is as wide as its widest line. Long cells get narrower until the table fits.
    longest = []
    for number in range(len(titles)):
        longest.append(max((_width(part) for row in texts for part in row[number]), default=0))
    while _reach(titles, longest, width) > room and width > _BAR:
        width -= 1
    wrap = textwrap.TextWrapper(width, break_on_hyphens=False).wrap
    rows = []
    for parts in texts:
        rows.append([[line for part in cell for line in wrap(part)] or [""] for cell in parts])
    lines = []
    if grid.caption:
        wide = textwrap.TextWrapper(room, break_long_words=False, break_on_hyphens=False)
        lines += wide.wrap(strip_controls(grid.caption))
    for place, shown in enumerate(_sections(grid, titles, rows, room)):
        lines += [""] if place else []
        lines += _section(grid, titles, rows, shown, room if place == 0 else 0)
    legend = [f"{name[:1]} {name}" for name in bar_parts(grid)]
    if legend:
        lines.append(", ".join(legend))
    return "\n".join(lines)


def _parts_of(cell: Cell, cut: bool) -> list[str]:
    """Return the lines of a cell: the text, and the small text beneath."""
    if isinstance(cell, Toned) and cell.beneath:
        return [strip_controls(cell.text), strip_controls(cell.beneath)]
    return [cell_text(cell, cut)]


def _reach(titles: Sequence[str], longest: Sequence[int], width: int) -> int:
    """Return the width of a table whose cells have at most `width` letters."""
    widths = []
    for title, most in zip(titles, longest, strict=True):
        widths.append(max(_width(title), min(width, most)))
    return sum(widths) + len(_BETWEEN) * (len(widths) - 1)


def _sections(
    grid: Grid, titles: Sequence[str], rows: Sequence[Sequence[Sequence[str]]], room: int
) -> list[list[int]]:
    """Return the columns of every table, as many as have room."""
    widths = _widths(titles, rows)
    named = [n for n, title in enumerate(grid.columns) if title in grid.stay]
    named = named or list(range(min(1, len(titles))))
    sections = [list(named)]
    for number in range(len(titles)):
        if number in named:
            continue
        reach = sum(widths[n] + len(_BETWEEN) for n in (*sections[-1], number))
        if reach - len(_BETWEEN) > room and len(sections[-1]) > len(named):
            sections.append(list(named))
        sections[-1].append(number)
    return sections


def _widths(titles: Sequence[str], rows: Sequence[Sequence[Sequence[str]]]) -> list[int]:
    widths = []
    for number, title in enumerate(titles):
        lines = [line for row in rows for line in row[number]]
        widths.append(max(_width(line) for line in (title, *lines)))
    return widths


def _section(
    grid: Grid,
    titles: Sequence[str],
    rows: Sequence[Sequence[Sequence[str]]],
    shown: Sequence[int],
    room: int,
) -> list[str]:
    """Draw some columns; with room, the text below each row too."""
    widths = [_widths(titles, rows)[number] for number in shown]
    aligned = [grid.columns[number] in grid.right for number in shown]
    lines = []
    if any(titles):
        lines += _drawn([[titles[number]] for number in shown], widths, aligned)
        lines.append(_BETWEEN.join("-" * width for width in widths))
    for place, cells in enumerate(rows):
        lines += _drawn([cells[number] for number in shown], widths, aligned)
        if grid.under and room:
            text = cell_text(grid.under[place])
            lines += textwrap.wrap(text, room, initial_indent="   ", subsequent_indent="   ")
    return lines


def bar_parts(grid: Grid) -> list[str]:
    """Return the parts of a table's bars, without duplicates. A bar of progress has none."""
    names: dict[str, None] = {}
    for row in grid.rows:
        for cell in row:
            if isinstance(cell, Bar):
                names |= {name: None for name, share in cell.parts if share > 0}
    return [name for name in names if name != DONE]


def cell_text(cell: Cell, cut: bool = False) -> str:
    """Write a cell on one line, maybe cut in the middle; marked words stand in brackets."""
    match cell:
        case Marked(parts):
            words = []
            for text, marked in parts:
                shown = strip_controls(text)
                words.append(f"[{shown}]" if marked else shown)
            return " ".join(words)
        case Bar():
            return _bar_text(cell)
        case Spark():
            return "".join(_BLOCKS[round(7 * height)] for height in cell.heights)
        case Toned():
            return strip_controls(f"{cell.text} {cell.beneath}" if cell.beneath else cell.text)
    shown = strip_controls(cell)
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
        lines.append(_BETWEEN.join(parts).rstrip())
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
