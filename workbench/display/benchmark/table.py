"""A benchmark's table as HTML, and as narrow text tables, with published figures beneath."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN
from workbench.benchmark.comparable_groups import Group
from workbench.display.benchmark.columns import COLOURS, MEMORY, Figures
from workbench.display.benchmark.published import published_blocks
from workbench.display.benchmark.sheet import Line, Part, Sheet, sheet_of
from workbench.display.kit.doc import Block, Doc, Heading, Items, Note, Raw, Table, to_html, to_text
from workbench.display.kit.downloads import Link
from workbench.display.kit.templates import macro, render

_WHO = ("#", "model", "technique", "pods", "outcome")
_CLASSES = {
    "#": "",
    "model": " wb-left wb-model",
    "technique": " wb-left",
    "pods": " wb-edge",
}
_WHO_AGAIN = ("#", "technique", "pods")  # in the second and further tables of a text
_TEXT_COLUMNS = 150
_WHY_LETTERS = 44
_MOST_LETTERS = 20
_LETTER_PX = 7.2  # mean width in notebooks' fonts at 13 px
_WIDE_PX = 7.8  # width of a letter in the widest font, bold
_BETWEEN_PX = 16.0  # space between columns
_CELL_PX = 1190  # width of a notebook's cell in a window of 1400 px


def benchmark_html(groups: Sequence[Group], links: Sequence[Link] = ()) -> str:
    """Draw a benchmark as HTML, with links to its files."""
    table = Raw(html=sheet_html(sheet_of(groups)))
    draw_downloads = macro("run.html", "downloads")
    downloads = Raw(html=draw_downloads(links))
    blocks = [table, downloads, *published_blocks()]
    return to_html(Doc(blocks=blocks, full=True))


def benchmark_text(groups: Sequence[Group]) -> str:
    """Draw a benchmark's table as text.

    A table too wide for a screen continues in a second table with the same rows.
    """
    blocks = sheet_blocks(sheet_of(groups))
    blocks += published_blocks()
    return to_text(Doc(blocks=blocks))


def sheet_html(sheet: Sheet) -> str:
    """Draw the table itself, for a page that has the style sheet."""
    who = _who_titles(sheet)
    classes = [f"wb-stay wb-at{place}{_CLASSES[title]}" for place, title in enumerate(who[:-1])]
    classes.append("wb-left")
    places = _places(sheet, who)
    # Columns past the right edge of a cell stand in a second table.
    first = []
    more = []
    for column in range(len(sheet.figures)):
        if _reach_px(sheet, places, column) < _CELL_PX:
            first.append(column)
        else:
            more.append(column)
    table = render(
        "benchmark.html",
        sheet=sheet,
        who=who,
        classes=classes,
        places=places,
        cells=_who_cells,
        shown=first,
        more=more,
        colours=COLOURS,
        unknown=UNKNOWN,
    )
    return str(table)


def _reach_px(sheet: Sheet, places: Sequence[tuple[int, int, int]], column: int) -> float:
    """Return a column's approximate right edge in pixels, with all columns in a single table."""
    fixed_px = sum(width for width, _, _ in places)
    outcome = max((len(line.outcome_text) for line in sheet.lines), default=0)
    letters = [outcome]
    for place, figures in enumerate(sheet.figures[: column + 1]):
        letters.append(_letters(figures.column.title, sheet.lines, place))
    return fixed_px + sum(_WIDE_PX * longest + _BETWEEN_PX for longest in letters)


def _letters(title: str, lines: Sequence[Line], place: int) -> int:
    """Return the letters of the longest text in a column of figures: title, figure or spread."""
    texts = [title]
    for line in lines:
        texts.append(_figure(line, place))
        texts.append(line.spreads[place])
    return max(len(text) for text in texts)


def _who_titles(sheet: Sheet) -> list[str]:
    return [title for title in _WHO if title != "model" or sheet.several_models]


def _who_cells(line: Line) -> dict[str, object]:
    """Return the cells that identify a row, by column title, with their sort keys."""
    return {
        "#": line.number,
        "model": line.model or UNKNOWN,
        "technique": line.technique,
        "pods": line.row.pods or UNKNOWN,
        "outcome": line.outcome_text,
    }


def sheet_blocks(sheet: Sheet) -> list[Block]:
    """State the table in blocks that text and Markdown can draw."""
    blocks: list[Block] = []
    for part in sheet.parts:
        blocks.append(Heading(part.heading, 3))
        blocks.append(Note(part.same))
        blocks += [Table(grid, _WHY_LETTERS) for grid in _grids(sheet, part)]
        blocks.append(Items(part.notes))
    blocks.append(Note(sheet.note))
    return blocks


def _grids(sheet: Sheet, part: Part) -> list[Grid]:
    """Return the tables of a part: sections of columns side by side, as many as a screen holds."""
    titles = [_title(figures) for figures in sheet.figures]
    whose = _who_titles(sheet)
    widths = [2 + _letters(title, part.lines, place) for place, title in enumerate(titles)]
    blocks: list[list[int]] = []
    room = 0
    for section, _ in sheet.sections(range(len(sheet.figures))):
        members = [
            n for n, figures in enumerate(sheet.figures) if figures.column.section == section
        ]
        wide = sum(widths[n] for n in members)
        if not blocks or wide > room:
            # The first table has the cells that identify a row; the next ones repeat a few.
            who = [whose]
            if not blocks:
                who += [_who(line, whose) for line in part.lines]
            room = _TEXT_COLUMNS - _width(who)
            blocks.append([])
        blocks[-1] += members
        room -= wide
    grids = []
    for place, block in enumerate(blocks):
        named = _WHO_AGAIN if place else whose
        shown = [(titles[n], n) for n in block]
        grids.append(_grid(part, named, shown))
    return grids


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of rows in letters, with two blanks behind each column."""
    width = 0
    for cells in zip(*rows, strict=True):
        longest = max(len(cell) for cell in cells)
        width += 2 + min(_WHY_LETTERS, longest)
    return width


def _figure(line: Line, place: int) -> str:
    star = "★ " if line.best[place] else ""
    return star + line.figures[place]


def _grid(part: Part, who: Sequence[str], shown: Sequence[tuple[str, int]]) -> Grid:
    rows: list[Sequence[str]] = []
    for line in part.lines:
        figures = [_figure(line, n) for _, n in shown]
        rows.append([*_who(line, who), *figures])
        spreads = [line.spreads[n] for _, n in shown]
        if any(spreads):
            beneath = {"technique": f"· {line.repeats} repeats"}
            words = [beneath.get(name, "") for name in who]
            rows.append([*words, *spreads])
    titles = [title for title, _ in shown]
    return Grid(
        columns=(*who, *titles),
        rows=rows,
        right={"#", "pods", *titles},
    )


def _who(line: Line, titles: Sequence[str]) -> list[str]:
    extra = f", {line.extra}" if line.extra else ""
    repeats = f", {line.repeats_text}" if line.repeats_text else ""
    why = f": {line.why}" if line.why else ""
    cells = _who_cells(line)
    cells["technique"] = line.technique + extra
    cells["outcome"] = line.outcome_text + repeats + why
    return [str(cells[title]) for title in titles]


def _title(figures: Figures) -> str:
    short = "memory " if figures.column.section == MEMORY else ""
    unit = f" {figures.unit}" if figures.unit else ""
    return f"{short}{figures.column.title}{unit}"


def _places(sheet: Sheet, who: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return width, left edge, and left edge in a narrow box, of every fixed column."""
    places = []
    left = 0
    left_if_narrow = 0
    for title in who[:-1]:
        texts = [title]
        for line in sheet.lines:
            texts.append(_longest(line, title))
        letters = max(len(text) for text in texts)
        space = 28 if title == "pods" else 18
        width = round(_LETTER_PX * min(_MOST_LETTERS, letters)) + space
        places.append((width, left, left_if_narrow))
        left += width
        # In a narrow box, the column of models scrolls away.
        if title != "model":
            left_if_narrow += width
    return places


def _longest(line: Line, title: str) -> str:
    cell = str(_who_cells(line)[title])
    if title == "technique" and len(line.extra) > len(cell):
        return line.extra
    return cell
