"""The table of a benchmark as HTML without a script, and as tables narrow enough for text, all from one `Sheet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN
from workbench.benchmark.comparable_groups import Group
from workbench.benchmark.published import PUBLISHED, Published
from workbench.benchmark.row import BenchmarkRow
from workbench.display.benchmark.columns import MEMORY, Figures
from workbench.display.benchmark.live import lines_of, live_html, live_text
from workbench.display.benchmark.outcome_cell import COLOURS
from workbench.display.benchmark.published import published_blocks
from workbench.display.benchmark.sheet import Line, Part, Sheet, sheet_of
from workbench.display.kit.doc import Block, Doc, Heading, Items, Note, Raw, Table, to_html, to_text
from workbench.display.kit.templates import render
from workbench.rundir.figures.progress import Progress

__all__ = ["benchmark_html", "benchmark_text", "sheet_blocks", "sheet_html"]

_WHO = ("#", "model", "technique", "pods", "outcome")
_CLASSES = (
    *("wb-stay wb-at0", "wb-stay wb-at1 wb-left wb-model", "wb-stay wb-at2 wb-left", "wb-stay wb-at3 wb-edge"),
    "wb-left",
)
_STAYING = 4  # columns that stay in sight
_WHO_AGAIN = ("#", "technique", "pods")  # in the second and further tables of a text
_TEXT_COLUMNS = 150
_WHY_LETTERS = 44
_MOST_LETTERS = 20
_LETTER_PX = 7.2  # of the fonts that notebooks use, at 13 px

Live = Mapping[str, Progress] | None
"""How far the rows that run are; None for a benchmark that is over."""


def benchmark_html(groups: Sequence[Group], published: Sequence[Published] = PUBLISHED, live: Live = None) -> str:
    """Draw a benchmark as HTML."""
    blocks: list[Block] = []
    if live is not None:
        blocks.append(Raw(html=live_html(lines_of(_rows(groups), live))))
    blocks += [Raw(html=sheet_html(sheet_of(groups))), *published_blocks(published)]
    return to_html(Doc(blocks=blocks, full=True))


def benchmark_text(groups: Sequence[Group], published: Sequence[Published] = PUBLISHED, live: Live = None) -> str:
    """Draw the same as text; a table too wide for a screen goes on in a second one with the same rows."""
    above = f"{live_text(lines_of(_rows(groups), live))}\n\n" if live is not None else ""
    return above + to_text(Doc(blocks=[*sheet_blocks(sheet_of(groups)), *published_blocks(published)]))


def _rows(groups: Sequence[Group]) -> list[BenchmarkRow]:
    return [row for group in groups for row in group.rows]


def sheet_html(sheet: Sheet) -> str:
    """Draw the table itself, for a page that has the style sheet."""
    across = len(_WHO) + len(sheet.figures)
    return str(
        render(
            "benchmark.html", sheet=sheet, who=_WHO, classes=_CLASSES, across=across, places=_places(sheet),
            colours=COLOURS, unknown=UNKNOWN,
        )
    )  # fmt: skip


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
    widths = [
        2 + max(len(title), *(len(text) for line in part.lines for text in (line.figures[n], line.spreads[n])))
        for n, title in enumerate(titles)
    ]
    blocks: list[list[int]] = []
    room = 0
    for section, _ in sheet.sections:
        members = [n for n, figures in enumerate(sheet.figures) if figures.column.section == section]
        wide = sum(widths[n] for n in members)
        if not blocks or wide > room:
            blocks.append([])
            who = [_WHO, *(_who(line) for line in part.lines)][: None if len(blocks) == 1 else 1]
            room = _TEXT_COLUMNS - sum(2 + min(_WHY_LETTERS, max(map(len, cells))) for cells in zip(*who, strict=True))
        blocks[-1] += members
        room -= wide
    return [_grid(part, [(titles[n], n) for n in block], first=not place) for place, block in enumerate(blocks)]


def _grid(part: Part, shown: Sequence[tuple[str, int]], *, first: bool) -> Grid:
    who = _WHO if first else _WHO_AGAIN
    rows: list[Sequence[str]] = []
    for line in part.lines:
        cells = dict(zip(_WHO, _who(line), strict=True))
        rows.append([*(cells[name] for name in who), *(line.figures[n] for _, n in shown)])
        if any(line.spreads[n] for _, n in shown):
            beneath = {"technique": f"· {line.repeats} repeats"}
            rows.append([*(beneath.get(name, "") for name in who), *(line.spreads[n] for _, n in shown)])
    titles = [title for title, _ in shown]
    return Grid(columns=(*who, *titles), rows=rows, right={"#", "pods", *titles})


def _who(line: Line) -> list[str]:
    technique = f"{line.technique}, {line.extra}" if line.extra else line.technique
    repeats = f", {line.repeats_text}" if line.repeats_text else ""
    outcome = line.outcome_text + repeats + (f": {line.why}" if line.why else "")
    return [str(line.number), line.model or UNKNOWN, technique, str(line.row.pods or UNKNOWN), outcome]


def _title(figures: Figures) -> str:
    short = "memory " if figures.column.section == MEMORY else ""
    return f"{short}{figures.column.title}" + (f" {figures.unit}" if figures.unit else "")


def _places(sheet: Sheet) -> list[tuple[int, int, int]]:
    """Return width, place from the left, and that in a narrow box without the model, of each staying column."""
    cells = [_who(line)[:_STAYING] for line in sheet.lines]
    extras = [max(len(line.technique), min(len(line.extra), _MOST_LETTERS)) for line in sheet.lines]
    letters = [min(_MOST_LETTERS, max(len(row[n]) for row in [list(_WHO), *cells])) for n in range(_STAYING)]
    letters[2] = min(_MOST_LETTERS, max(len(_WHO[2]), *extras, 0))
    widths = [round(_LETTER_PX * n) + (28 if place == _STAYING - 1 else 18) for place, n in enumerate(letters)]
    return [
        (width, sum(widths[:place]), sum(w for n, w in enumerate(widths[:place]) if _WHO[n] != "model"))
        for place, width in enumerate(widths)
    ]
