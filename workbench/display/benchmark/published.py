"""Published figures for the eye: tables that say who published them, apart from one's own, caveats beneath. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from workbench.base.table import Grid, text_table
from workbench.base.words import count, duration, percent, plain
from workbench.benchmark.published import CAVEATS, WALKTHROUGH, Published
from workbench.display.benchmark.columns import COLUMNS, Column, figures_of
from workbench.display.kit.style import styled
from workbench.display.kit.table import html_table

__all__ = ["published_grids", "published_html", "published_text"]

_NOT_FOUND = "not found"
_COLUMNS = {column.field: column for column in COLUMNS}


def published_grids(published: Sequence[Published]) -> list[tuple[Grid, tuple[str, ...]]]:
    """Return the tables, one for each source, and the caveats that belong beneath each."""
    sources = dict.fromkeys(row.source for row in published)
    return [
        (_grid(source, [row for row in published if row.source == source]), CAVEATS if source == WALKTHROUGH else ())
        for source in sources
    ]


def published_html(published: Sequence[Published]) -> str:
    """Draw them as HTML, everything escaped; empty where there are none."""
    parts = []
    for grid, caveats in published_grids(published):
        said = "".join(f"<li>{html.escape(caveat)}</li>" for caveat in caveats)
        beneath = f"<ul class='wb-quiet'>{said}</ul>" if said else ""
        parts.append(f"<div class='wb-wide'><div style='min-width: 1320px'>{html_table(grid)}</div></div>{beneath}")
    return styled("".join(parts), full=True) if parts else ""


def published_text(published: Sequence[Published]) -> str:
    """Draw them as text."""
    parts = []
    for grid, caveats in published_grids(published):
        parts.append("\n".join([text_table(grid, width=40), *(f"- {caveat}" for caveat in caveats)]))
    return "\n\n".join(parts)


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
    said = f"; not found in it: {', '.join(lacking)}" if lacking else ""
    return Grid(
        columns=titles,
        rows=[[columns[title][n] for title in titles] for n in range(len(rows))],
        right={*titles} - {"model", "technique", "on each", "note"},
        whole={*titles} - {"note"},
        caption=f"Published, not measured here: {plain(source)}{said}",
    )


def _written(field: str, values: Sequence[float | None]) -> list[str]:
    """Write the figures of a column in one unit, so that their points line up."""
    known = [value for value in values if value is not None]
    column: Column = _COLUMNS[field]
    if not known:
        return [_NOT_FOUND for _ in values]
    figures = figures_of(column, known)
    unit = f" {figures.unit}" if figures.unit not in ("", "1/s") else ""
    return [_NOT_FOUND if value is None else figures.write(value) + unit for value in values]


def _known(value: object, text: str) -> str:
    return _NOT_FOUND if value is None else text
