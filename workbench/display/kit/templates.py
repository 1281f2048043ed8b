"""HTML by templates, tables included.

All values but `Markup` are escaped, without control characters.

The style sheet `assets/sheet.css` confines every rule to `.wb`. Colours are JupyterLab's if
present.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from workbench.base.table import DONE, Bar, Grid, Key, Toned, bar_parts, cell_text
from workbench.base.words import middle_cut, strip_controls
from workbench.display.kit.logs import clean
from workbench.display.kit.plots.figure import COLOURS

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.runtime import Macro


_BAD = "var(--jp-error-color1, #d32f2f)"
_BUSY = "var(--jp-brand-color1, #1976d2)"
_STATE_COLOURS = {
    "succeeded": "var(--jp-success-color1, #2e7d32)",
    "failed": _BAD,
    "lost": _BAD,
    "stopped": "#5b8a72",
    "cancelled": "var(--jp-warn-color1, #c77700)",
    "queued": "var(--jp-ui-font-color3, #888)",
}
# Colours of cells without the style sheet.
_TONES = {
    "good": "#2e7d32",
    "bad": "#d32f2f",
    "warn": "#a65f00",
    "busy": "#1976d2",
    "quiet": "#707070",
}
_ROOMS_PX = (490, 690, 840, 1050)  # of a notebook's cell, without tick boxes; `sheet.css` has these
_BAR_PX = 130  # the least width of a bar
_LETTER_PX = 7.6
_BETWEEN_PX = 16.0
_ROUND_PX = 8  # digits and bold letters are wider than most
_MOST_PX = 220  # width of a column that stays in sight; longer texts have several lines
_LEAST_PX = 100
_STAY_SHARE = 0.2  # of a narrow cell, for a column that stays in sight
_PROSE_PX = 140  # the least width of a column of sentences
_STAYING = (
    "; position: sticky; left: calc({left}); z-index: 1; box-sizing: border-box; width: {width}; "
    "min-width: {width}; max-width: {width}; "
    "background: var(--wb-page, var(--jp-layout-color0, var(--vscode-editor-background, Canvas)))"
)
_SPECIAL = re.compile(
    r"</?s>|<(?:pad|unk|mask|bos|eos|extra_id_\d+|(?:start|end)_of_turn)>|<\|[\w-]+\|>"
    r"|\[(?:PAD|SEP|CLS|MASK|/?INST)\]"
)
_CHIP = Markup(
    '<span style="background: #757575; color: #fff; border-radius: 3px; padding: 0 3px; '
    'font-size: 85%">{}</span>'
)
_PROSE = 30  # letters of a cell
_WORD = 40  # letters of a word


def render(name: str, **values: object) -> Markup:
    return Markup(_environment().get_template(name).render(values))


def styled(
    content: str,
    state: str = "",
    *,
    full: bool = False,
    sheet: bool = True,
) -> str:
    """Put HTML into the frame of the style sheet, with the sheet unless the page has it."""
    colour = _STATE_COLOURS.get(state, _BUSY)
    return str(
        render(
            "frame.html",
            content=Markup(content),
            colour=colour,
            full=full,
            sheet=sheet,
        )
    )


def macro(template: str, name: str) -> Macro:
    """Return a macro of a template, to be called with its arguments."""
    drawing: Macro = getattr(_environment().get_template(template).module, name)
    return drawing


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("workbench.display"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = lambda text: escape(strip_controls(text))
    environment.filters["middle_cut"] = lambda text: escape(middle_cut(strip_controls(text)))
    environment.filters["cell_text"] = cell_text
    environment.filters["tokens"] = _tokens
    environment.filters["lines"] = _kept_lines
    environment.filters["key"] = _key
    environment.filters["source"] = _source
    return environment


def _finalized(value: object) -> object:
    """Remove control characters from a written value, unless the value is markup."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return clean(value)
    return value


def _kept_lines(text: str) -> Markup:
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip(" "))
        lines.append(" " * indent + strip_controls(line))
    return escape("\n".join(lines))


def _tokens(text: str) -> Markup:
    """Draw the special tokens of a tokenizer as grey chips, so that text and tokens differ."""
    pieces = []
    reached = 0
    plain = strip_controls(text)
    for token in _SPECIAL.finditer(plain):
        pieces += [escape(plain[reached : token.start()]), _CHIP.format(token[0])]
        reached = token.end()
    return Markup("").join([*pieces, escape(plain[reached:])])


def _key(value: Key) -> str:
    match value:
        case str():
            return strip_controls(value)
        case None:
            return ""
    return f"{value:.12g}"


def _source(name: str) -> str:
    """Return what a Content Security Policy calls a script of ours."""
    digest = hashlib.sha256(render(name).encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


def html_table(grid: Grid) -> str:
    """Draw a table. Columns of a grid with `stay` that have no room in a cell are in a fold."""
    bars = dict(zip(bar_parts(grid), COLOURS, strict=False))
    rooms = _rooms(grid)
    first = [n for n, room in enumerate(rooms) if room < len(_ROOMS_PX)]
    more = [n for n, room in enumerate(rooms) if room]
    stay = [n for n, title in enumerate(grid.columns) if title in grid.stay]
    return str(
        render(
            "table.html",
            grid=grid,
            first=first,
            more=[*stay, *more] if more else [],
            rooms=rooms,
            styles=_styles(grid),
            cut=[title in grid.cut for title in grid.columns],
            bars={**bars, DONE: _TONES["busy"]},
            legend=bars,
            tones=_TONES,
        )
    )


def _column_px(title: str, texts: Iterable[str]) -> float:
    """Return the approximate width of a column in pixels. Titles wrap at blanks."""
    longest = max(len(text) for text in (*title.split(), *texts, ""))
    return _LETTER_PX * longest + _BETWEEN_PX


def _rooms(grid: Grid) -> list[int]:
    """Return how many of the widths of `_ROOMS_PX` are too narrow for each column."""
    rooms = [0] * len(grid.columns)
    for room in _ROOMS_PX:
        reach = 0.0
        for number, title in enumerate(grid.columns):
            reach += _least_px(grid, number, room)
            if grid.stay and title not in grid.stay and reach > room:
                rooms[number] += 1
    return rooms


def _least_px(grid: Grid, number: int, room: int) -> float:
    """Return the approximate least width of a column in a cell of `room` pixels."""
    title = grid.columns[number]
    if title in grid.stay:
        return min(_stay_px(grid, title), max(_LEAST_PX, _STAY_SHARE * room))
    texts = _texts(grid, title)
    if title in grid.whole or title in grid.right:
        is_bar = any(isinstance(row[number], Bar) for row in grid.rows)
        return max(_column_px(title, texts), _BAR_PX * is_bar)
    words = [word for text in texts for word in text.split() if len(word) <= _WORD]
    is_prose = any(len(text) > _PROSE for text in texts)
    return max(_column_px(title, words), _PROSE_PX * is_prose)


def _stay_px(grid: Grid, title: str) -> int:
    """Return the width of a column that stays in sight."""
    return min(_MOST_PX, round(_ROUND_PX + _column_px(title, _texts(grid, title))))


def _styles(grid: Grid) -> list[str]:
    # Columns of sentences share the room that other columns leave.
    loose = [title for title in grid.columns if title not in grid.whole] if grid.whole else []
    prose = [title for title in loose if any(len(text) > _PROSE for text in _texts(grid, title))]
    styles = []
    left = "0px"
    for title in grid.columns:
        style = _style(grid, title, 90 // len(prose) if title in prose else 0)
        if title in grid.stay:
            share = f"max({_LEAST_PX}px, {100 * _STAY_SHARE:g}cqw)"
            width = f"min({_stay_px(grid, title)}px, {share})"
            style += _STAYING.format(left=left, width=width)
            left += f" + {width}"
        styles.append(style)
    return styles


def _style(grid: Grid, title: str, share: int) -> str:
    side = "right; font-variant-numeric: tabular-nums" if title in grid.right else "left"
    border = "border-bottom: 1px solid var(--jp-border-color2, #8884)"
    space = "white-space: nowrap"
    if title in grid.stay:
        space = "white-space: normal; overflow-wrap: break-word"
    elif title not in grid.whole and title not in grid.right:
        space = _wrap(grid, title)
    # Columns of sentences share the room equally and stay wide enough to
    # read in a table that scrolls.
    wide = f"; min-width: 14em; min-width: min(14em, 16cqw); width: {share}%" if share else ""
    pad = "padding: 2px 8px; padding: 2px clamp(4px, 1cqw, 8px)"
    return f"text-align: {side}; {pad}; vertical-align: top; {border}; {space}{wide}"


def _wrap(grid: Grid, title: str) -> str:
    """Break only overlong words; keep the line breaks of plain texts, such as model output."""
    words = " ".join(_texts(grid, title)).split()
    has_long_word = any(len(word) > _WORD for word in words)
    style = f"overflow-wrap: {'anywhere' if has_long_word else 'break-word'}"
    place = list(grid.columns).index(title)
    cells = [row[place] for row in grid.rows]
    texts = [cell for cell in cells if isinstance(cell, str)]
    if len(texts) == len(cells) and any("\n" in text for text in texts):
        style += "; white-space: pre-wrap"
    return style


def _texts(grid: Grid, title: str) -> list[str]:
    """Return the lines of a column."""
    place = list(grid.columns).index(title)
    texts = []
    for row in grid.rows:
        match row[place]:
            case Toned(text, _, beneath):
                texts += [strip_controls(text), strip_controls(beneath)]
            case Bar():
                texts.append("")
            case cell:
                texts.append(cell_text(cell, title in grid.cut))
    return texts
