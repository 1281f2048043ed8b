"""A dataset in the model's reading: sample rows with marked labels, lengths, cuts, duplicates."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.table import Grid, Marked, facts
from workbench.base.words import count, percent, plain, short_list
from workbench.display.kit.doc import Block, Doc, Note, Table
from workbench.finetune.plan.reading import RowPreview

_BARS = 8  # approximate number of length ranges
_NAMES = 20  # number of column names
_WIDTH = 24  # letters of the longest bar


def rows_doc(preview: RowPreview) -> Doc:
    first = "" if preview.is_all else " among the first rows of the hub"
    pairs = [
        (
            "rows to train on",
            count(preview.train_rows) + ("" if preview.is_all else ", the first of the hub"),
        ),
        ("rows to evaluate on", count(preview.eval_rows)),
        ("training rows that repeat an earlier one", count(preview.duplicates) + first),
        ("evaluation rows that are training rows too", count(preview.overlap) + first),
        ("rows with an empty answer", count(preview.empty_answers) + first),
        (
            "columns not read",
            plain(short_list(preview.not_read, _NAMES)) if preview.not_read else "none",
        ),
    ]
    marked = [(str(number), Marked(tuple(row))) for number, row in enumerate(preview.rows, 1)]
    rows = Grid(
        columns=("row", "as the model reads it; what it learns is marked"),
        rows=marked,
        right={"row"},
    )
    blocks: list[Block] = [
        Table(facts(f"Rows for {preview.job.model}", pairs)),
        Table(rows, width=100),
    ]
    return Doc(blocks=[*blocks, Table(_histogram(preview)), *map(Note, _notes(preview))])


def _histogram(preview: RowPreview) -> Grid:
    read = [length.read for length in preview.lengths]
    learned = [length.learned for length in preview.lengths]
    longest = max([*read, *learned], default=0)
    step = max(1, -(-(longest + 1) // _BARS))
    ranges = [range(first, first + step) for first in range(0, longest + 1, step)]
    columns = [
        _bars([sum(length in part for length in lengths) for part in ranges])
        for lengths in (read, learned)
    ]
    return Grid(
        columns=("tokens", "read", "rows", "learned", "rows "),
        rows=[
            (f"{part[0]}–{part[-1]}", bar, number, other, others)
            for part, (bar, number), (other, others) in zip(ranges, *columns, strict=True)
        ],
        right={"rows", "rows "},
        whole={"tokens", "read", "learned"},
        caption=f"Lengths of {count(len(preview.lengths))} training rows, before anything is cut",
    )


def _bars(rows: Sequence[int]) -> list[tuple[str, str]]:
    most = max([*rows, 1])
    return [("█" * -(-_WIDTH * number // most), count(number)) for number in rows]


def _notes(preview: RowPreview) -> list[str]:
    job = preview.job
    rows = max(1, len(preview.lengths))
    cut = {
        f"max_source_length={job.max_source_length}": sum(
            length.read_is_cut for length in preview.lengths
        ),
        f"max_target_length={job.max_target_length}": sum(
            length.learned_is_cut for length in preview.lengths
        ),
    }
    return [
        f"{option} cuts {count(number)} of them ({percent(number / rows)})."
        for option, number in cut.items()
    ]
