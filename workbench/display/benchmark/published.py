"""Published figures: tables that name who published them, apart from one's own, caveats beneath. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Grid
from workbench.base.words import count, duration, percent, plain
from workbench.benchmark.published import CAVEATS, WALKTHROUGH, Published
from workbench.display.benchmark.columns import COLUMNS, figures_of
from workbench.display.kit.doc import Block, Items, Table

_NOT_FOUND = "not found"
_WIDTH = 40  # letters of a cell in text
_COLUMNS = {column.field: column for column in COLUMNS}


def published_blocks(published: Sequence[Published]) -> list[Block]:
    """State the figures as tables, one for each source, with the caveats beneath."""
    blocks: list[Block] = []
    for source in dict.fromkeys(row.source for row in published):
        rows = [row for row in published if row.source == source]
        blocks += [Table(_grid(source, rows), _WIDTH), Items(CAVEATS if source == WALKTHROUGH else ())]
    return blocks


def _grid(source: str, rows: Sequence[Published]) -> Grid:
    columns: dict[str, list[str]] = {
        "model": [plain(row.model) for row in rows],
        "technique": [plain(row.technique) for row in rows],
        "pods": [count(row.pods) for row in rows],
        "on each": [plain(row.device) for row in rows],
        "global batch": [_known(row.global_batch, count(row.global_batch)) for row in rows],
        "epochs": [_known(row.epochs, count(row.epochs)) for row in rows],
        "duration": [_known(row.duration_s, duration(row.duration_s)) for row in rows],
        "samples/s": _written("samples_per_s", [row.samples_per_s for row in rows]),
        "speed-up": _written("speed_up", [row.speed_up for row in rows]),
        "efficiency": [_known(row.efficiency, percent(row.efficiency)) for row in rows],
        "GPU memory GB": [
            "out of memory" if row.out_of_memory else _known(row.memory_gb, f"{row.memory_gb or 0:g}") for row in rows
        ],
        "note": [plain(row.note) for row in rows],
    }
    lacking = [title for title, cells in columns.items() if set(cells) == {_NOT_FOUND}]
    titles = [title for title in columns if title not in lacking]
    absent = f"; not found in it: {', '.join(lacking)}" if lacking else ""
    return Grid(
        columns=titles,
        rows=[[columns[title][n] for title in titles] for n in range(len(rows))],
        right={*titles} - {"model", "technique", "on each", "note"},
        whole={*titles} - {"note"},
        caption=f"Published, not measured here: {plain(source)}{absent}",
    )


def _written(field: str, values: Sequence[float | None]) -> list[str]:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return [_NOT_FOUND for _ in values]
    figures = figures_of(_COLUMNS[field], numbers)
    unit = f" {figures.unit}" if figures.unit not in ("", "1/s") else ""
    return [_NOT_FOUND if value is None else figures.write(value) + unit for value in values]


def _known(value: object, text: str) -> str:
    return _NOT_FOUND if value is None else text
