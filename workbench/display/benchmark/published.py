"""Published figures of other benchmarks, in a table per source."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Grid
from workbench.base.words import UNKNOWN, count, duration, number, percent, strip_controls
from workbench.benchmark.published import CAVEATS, PUBLISHED, WALKTHROUGH, Published
from workbench.display.kit.doc import Block, Items, Table

_WIDTH = 40  # letters of a cell in text


def published_blocks() -> list[Block]:
    """Return a table per source, followed by the caveats."""
    blocks: list[Block] = []
    for source in dict.fromkeys(row.source for row in PUBLISHED):
        rows = [row for row in PUBLISHED if row.source == source]
        blocks.append(Table(_published_grid(source, rows), _WIDTH))
        blocks.append(Items(CAVEATS if source == WALKTHROUGH else ()))
    return blocks


def _published_grid(source: str, rows: Sequence[Published]) -> Grid:
    columns: dict[str, list[str]] = {
        "model": [strip_controls(row.model) for row in rows],
        "technique": [strip_controls(row.technique) for row in rows],
        "pods": [count(row.pods) for row in rows],
        "on each": [strip_controls(row.device) for row in rows],
        "global batch": [count(row.global_batch) for row in rows],
        "epochs": [count(row.epochs) for row in rows],
        "duration": [duration(row.duration_s) for row in rows],
        "samples/s": [number(row.samples_per_s) for row in rows],
        "speed-up": [number(row.speed_up) for row in rows],
        "efficiency": [percent(row.efficiency) for row in rows],
        "GPU memory GB": [
            "out of memory" if row.out_of_memory else number(row.memory_gb) for row in rows
        ],
    }
    # A column that a source never states becomes a word of the caption.
    titles = []
    lacking = []
    for title, cells in columns.items():
        if set(cells) == {UNKNOWN}:
            lacking.append(title)
        else:
            titles.append(title)
    absent = f"; not found in it: {', '.join(lacking)}" if lacking else ""
    written: list[list[str]] = []
    for place in range(len(rows)):
        cells = [columns[title][place] for title in titles]
        written.append(["not found" if cell == UNKNOWN else cell for cell in cells])
    return Grid(
        columns=titles,
        rows=written,
        right=set(titles) - {"model", "technique", "on each"},
        whole=titles,
        stay=("model", "technique", "pods"),
        under=[row.note for row in rows],
        caption=f"Published, not measured here: {strip_controls(source)}{absent}",
    )
