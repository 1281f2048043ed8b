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
_CLASSES = {"#": "", "model": " wb-left wb-model", "technique": " wb-left", "pods": " wb-edge"}
_WHO_AGAIN = ("#", "technique", "pods")  # in the second and further tables of a text
_TEXT_COLUMNS = 150
_WHY_LETTERS = 44
_MOST_LETTERS = 20
_LETTER_PX = 7.2  # mean width in notebooks' fonts at 13 px
_WIDE_PX, _BETWEEN_PX = 7.8, 16.0  # width in the widest font, bold; space between columns
_CELL_PX = 1190  # width of a notebook's cell in a window of 1400 px


def benchmark_html(groups: Sequence[Group], links: Sequence[Link] = ()) -> str:
    """Draw a benchmark as HTML, with links to its files."""
    table = Raw(html=sheet_html(sheet_of(groups)))
    downloads = Raw(html=macro("run.html", "downloads")(links))
    return to_html(Doc(blocks=[table, downloads, *published_blocks()], full=True))


def benchmark_text(groups: Sequence[Group]) -> str:
    """Draw a benchmark's table as text.

    A table too wide for a screen goes on in a second one with the same rows.
    """
    return to_text(Doc(blocks=[*sheet_blocks(sheet_of(groups)), *published_blocks()]))


def sheet_html(sheet: Sheet) -> str:
    """Draw the table itself, for a page that has the style sheet."""
    who = _who_titles(sheet)
    classes = [f"wb-stay wb-at{place}{_CLASSES[title]}" for place, title in enumerate(who[:-1])]
    places = _places(sheet, who)
    shown = range(len(sheet.figures))
    first = [n for n in shown if _reach_px(sheet, places, n) < _CELL_PX]
    return str(
        render(
            "benchmark.html",
            sheet=sheet,
            who=who,
            classes=[*classes, "wb-left"],
            places=places,
            cells=_who_cells,
            shown=first,
            more=[n for n in shown if n not in first],
            colours=COLOURS,
            unknown=UNKNOWN,
        )
    )


def _reach_px(sheet: Sheet, places: Sequence[tuple[int, int, int]], column: int) -> float:
    """Return a column's approximate right edge in pixels, with all columns in a single table."""
    outcome = max((len(line.outcome_text) for line in sheet.lines), default=0)
    letters = [outcome]
    for n, figures in enumerate(sheet.figures[: column + 1]):
        texts = (text for line in sheet.lines for text in (_figure(line, n), line.spreads[n]))
        letters.append(max(len(figures.column.title), *map(len, texts)))
    return sum(width for width, _, _ in places) + sum(_WIDE_PX * n + _BETWEEN_PX for n in letters)


def _who_titles(sheet: Sheet) -> list[str]:
    return [title for title in _WHO if title != "model" or sheet.several_models]


def _who_cells(line: Line) -> dict[str, object]:
    """Return the cells that identify a row, by column title, with their sort keys."""
    row = line.row
    cells: dict[str, object] = {
        "#": line.number,
        "model": line.model or UNKNOWN,
        "technique": line.technique,
    }
    return {**cells, "pods": row.pods or UNKNOWN, "outcome": line.outcome_text}


def sheet_blocks(sheet: Sheet) -> list[Block]:
    """State the table in blocks that text and Markdown can draw."""
    blocks: list[Block] = []
    for part in sheet.parts:
        blocks += [Heading(part.heading, 3), Note(part.same)]
        blocks += [Table(grid, _WHY_LETTERS) for grid in _grids(sheet, part)]
        blocks.append(Items(part.notes))
    return [*blocks, Note(sheet.note)]


def _grids(sheet: Sheet, part: Part) -> list[Grid]:
    titles = [_title(figures) for figures in sheet.figures]
    whose = _who_titles(sheet)
    widths = [
        2
        + max(
            len(title),
            *(len(text) for line in part.lines for text in (_figure(line, n), line.spreads[n])),
        )
        for n, title in enumerate(titles)
    ]
    blocks: list[list[int]] = []
    room = 0
    for section, _ in sheet.sections(range(len(sheet.figures))):
        members = [
            n for n, figures in enumerate(sheet.figures) if figures.column.section == section
        ]
        wide = sum(widths[n] for n in members)
        if not blocks or wide > room:
            blocks.append([])
            who = [whose, *(_who(line, whose) for line in part.lines)][
                : None if len(blocks) == 1 else 1
            ]
            room = _TEXT_COLUMNS - sum(
                2 + min(_WHY_LETTERS, max(map(len, cells))) for cells in zip(*who, strict=True)
            )
        blocks[-1] += members
        room -= wide
    return [
        _grid(part, whose if not place else _WHO_AGAIN, [(titles[n], n) for n in block])
        for place, block in enumerate(blocks)
    ]


def _figure(line: Line, place: int) -> str:
    return ("★ " if line.best[place] else "") + line.figures[place]


def _grid(part: Part, who: Sequence[str], shown: Sequence[tuple[str, int]]) -> Grid:
    rows: list[Sequence[str]] = []
    for line in part.lines:
        rows.append([*_who(line, who), *(_figure(line, n) for _, n in shown)])
        if any(line.spreads[n] for _, n in shown):
            beneath = {"technique": f"· {line.repeats} repeats"}
            rows.append(
                [*(beneath.get(name, "") for name in who), *(line.spreads[n] for _, n in shown)]
            )
    titles = [title for title, _ in shown]
    return Grid(columns=(*who, *titles), rows=rows, right={"#", "pods", *titles})


def _who(line: Line, titles: Sequence[str]) -> list[str]:
    technique = f"{line.technique}, {line.extra}" if line.extra else line.technique
    repeats = f", {line.repeats_text}" if line.repeats_text else ""
    outcome = line.outcome_text + repeats + (f": {line.why}" if line.why else "")
    cells = {**_who_cells(line), "technique": technique, "outcome": outcome}
    return [str(cells[title]) for title in titles]


def _title(figures: Figures) -> str:
    short = "memory " if figures.column.section == MEMORY else ""
    return f"{short}{figures.column.title}" + (f" {figures.unit}" if figures.unit else "")


def _places(sheet: Sheet, who: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return width, left edge, and left edge in a narrow box, of every fixed column."""
    staying = who[:-1]
    letters = {
        title: min(
            _MOST_LETTERS, max(len(title), *(len(_longest(line, title)) for line in sheet.lines), 0)
        )
        for title in staying
    }
    widths = [
        round(_LETTER_PX * letters[title]) + (28 if title == "pods" else 18) for title in staying
    ]
    return [
        (
            width,
            sum(widths[:place]),
            sum(w for n, w in enumerate(widths[:place]) if staying[n] != "model"),
        )
        for place, width in enumerate(widths)
    ]


def _longest(line: Line, title: str) -> str:
    cell = str(_who_cells(line)[title])
    return max(cell, line.extra, key=len) if title == "technique" else cell
