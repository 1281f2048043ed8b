"""The memory of a benchmark's rows: bars of the measured memory, with a stroke at the predicted."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Bar, Grid
from workbench.base.words import gib
from workbench.benchmark.row import Outcome
from workbench.display.benchmark.sheet import Line, Sheet
from workbench.display.kit.doc import Block, Note, Table

_NOT_FITTING = (Outcome.SKIPPED, Outcome.OUT_OF_MEMORY)
_KINDS = {"cuda": "reserved CUDA memory", "resident": "resident memory of the ranks"}
NO_MEMORY = "Not drawn: no row tells its memory, measured or predicted."


def memory_blocks(sheet: Sheet) -> list[Block]:
    """State the memory of every row, if any row has a memory."""
    lines = [line for line in sheet.lines if _sizes(line)]
    if not lines:
        return []
    reach = _reach_gib(lines)
    rows = []
    # Bars of all rows share a scale, so that they can be compared.
    for line in lines:
        measured = line.row.peak_memory_gib
        predicted = line.row.predicted_memory_gib
        bar = Bar(
            parts=(("measured", (measured or 0.0) / reach),),
            limit=None if predicted is None else predicted / reach,
            words=f"measured {gib(measured)}, predicted {gib(predicted)}",
        )
        rows.append((line.label, bar, gib(measured), gib(predicted), line.outcome_text))
    columns = ("row", "peak memory of a pod", "measured", "predicted", "outcome")
    grid = Grid(columns=columns, rows=rows, right=columns[2:4], whole=columns, stay=("row",))
    # GPUs report reserved memory, CPUs resident memory: the note says which.
    counted = sorted({_KINDS.get(line.row.memory_kind, "") for line in lines} - {""})
    note = (
        "The highest of the pods. Measured is "
        f"{' or '.join(counted) or 'what the pods reported'}; predicted "
        "is the planner's figure for the planned length of the rows: "
        "shorter rows need less, and longer rows need more. A stroke marks the predicted figure; "
        "the stroke of a row that does not fit may lie outside."
    )
    return [Table(grid), Note(note)]


def _sizes(line: Line) -> list[float]:
    sizes = (line.row.peak_memory_gib, line.row.predicted_memory_gib)
    return [size for size in sizes if size]


def _reach_gib(lines: Sequence[Line]) -> float:
    """Return the end of the bars. Predictions of rows that do not fit may lie far behind."""
    fitting = [line for line in lines if line.row.outcome not in _NOT_FITTING]
    return max(size for line in fitting or lines for size in _sizes(line))
