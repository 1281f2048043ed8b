"""A benchmark's table: a grid for each group of comparable rows, and published figures beneath."""

from __future__ import annotations

from workbench.base.table import Cell, Grid, Key, Toned
from workbench.base.words import count
from workbench.benchmark.result import BenchmarkResult
from workbench.display.benchmark.columns import TONES, value_of
from workbench.display.benchmark.published import published_blocks
from workbench.display.benchmark.sheet import Line, Part, Sheet, sheet_of
from workbench.display.kit.doc import Block, Doc, Heading, Items, Note, Raw, Table
from workbench.display.kit.downloads import report_links
from workbench.display.kit.templates import macro

_WHO = ("#", "model", "technique", "pods", "outcome")


def benchmark_doc(benchmark: BenchmarkResult) -> Doc:
    """State a benchmark. HTML has a link to the report."""
    draw_downloads = macro("run.html", "downloads")
    downloads = Raw(html=draw_downloads(report_links(benchmark.folder)))
    blocks = [*sheet_blocks(sheet_of(benchmark.groups)), downloads, *published_blocks()]
    return Doc(blocks=blocks, full=True)


def sheet_blocks(sheet: Sheet) -> list[Block]:
    blocks: list[Block] = []
    for part in sheet.parts:
        blocks.append(Heading(part.heading, 3))
        blocks.append(Note(part.same))
        blocks.append(Table(_grid(sheet, part)))
        blocks.append(Items(part.notes))
    if not sheet.parts:
        blocks.append(Note("no rows"))
    blocks.append(Note(sheet.note))
    return blocks


def _grid(sheet: Sheet, part: Part) -> Grid:
    who = [title for title in _WHO if title != "model" or sheet.several_models]
    titles = [column.title for column in sheet.figures]
    rows: list[list[Cell]] = []
    keys: list[list[Key]] = []
    for line in part.lines:
        cells, sorted_by = _who_of(line)
        figures = [_figure(line, place) for place in range(len(titles))]
        values = [value_of(line.row, column.name) for column in sheet.figures]
        rows.append([*(cells[title] for title in who), *figures])
        keys.append([*(sorted_by[title] for title in who), *values])
    columns = (*who, *titles)
    whys = [Toned(line.why, TONES[line.row.outcome]) if line.why else "" for line in part.lines]
    return Grid(
        columns=columns,
        rows=rows,
        keys=keys,
        right={"#", "pods", *titles},
        whole=columns,
        stay=who,
        under=whys if any(line.why for line in part.lines) else (),
    )


def _who_of(line: Line) -> tuple[dict[str, Cell], dict[str, Key]]:
    """Return the cells that name and judge a row, by column, and their sort keys."""
    cells: dict[str, Cell] = {
        "#": str(line.number),
        "model": line.model,
        "technique": Toned(line.technique, beneath=line.extra),
        "pods": count(line.row.pods or None),
        "outcome": Toned(line.outcome_text, TONES[line.row.outcome], line.repeats_text),
    }
    keys: dict[str, Key] = {
        "#": line.number,
        "model": line.model,
        "technique": line.technique,
        "pods": line.row.pods,
        "outcome": line.outcome_text,
    }
    return cells, keys


def _figure(line: Line, place: int) -> Cell:
    if line.best[place]:
        return Toned(f"★ {line.figures[place]}", "good", line.spreads[place])
    return Toned(line.figures[place], beneath=line.spreads[place])
