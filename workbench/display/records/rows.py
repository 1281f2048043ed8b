"""A dataset in the model's reading: sample rows with marked labels, lengths, cuts, duplicates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.base.table import DONE, Bar, Cell, Grid, Marked, facts
from workbench.base.words import count, percent, pluralize, short_list, strip_controls
from workbench.display.kit.doc import Block, Doc, Note, Table
from workbench.finetune.options.model.models import toy_remark
from workbench.finetune.plan.reading import RowPreview

_BARS = 8  # approximate number of length ranges
_NAMES = 20  # number of column names


def rows_doc(preview: RowPreview) -> Doc:
    some = ""
    first = ""
    # A dataset of the hub is read only as far as the preview needs.
    if not preview.is_all:
        some = ", the first of the hub"
        first = " among the first rows of the hub"
    not_read = strip_controls(short_list(preview.not_read, _NAMES)) if preview.not_read else "none"
    pairs = [
        ("rows to train on", count(preview.train_rows) + some),
        ("rows to evaluate on", count(preview.eval_rows)),
        ("training rows that repeat an earlier one", count(preview.duplicates) + first),
        ("evaluation rows that are training rows too", count(preview.overlap) + first),
        ("rows with an empty answer", count(preview.empty_answers) + first),
        ("not read", not_read),
    ]
    for remark, number in preview.remarks.items():
        pairs.append((f"rows with {remark}", count(number)))
    # The learned part of each row is marked, the rest is the prompt.
    marked = [(str(number), Marked(tuple(row))) for number, row in enumerate(preview.rows, 1)]
    rows = Grid(
        columns=("row", "as the model reads it; what it learns is marked"),
        rows=marked,
        right={"row"},
        caption=_rows_shown(preview),
    )
    blocks: list[Block] = [
        Table(facts(f"Rows for {preview.job.model}", pairs)),
        Table(rows, width=100),
        Table(_histogram(preview)),
    ]
    blocks += [Note(text) for text in _notes(preview)]
    if remark := toy_remark(preview.job.model):
        blocks.append(Note(f"Model {preview.job.model}: {remark}."))
    return Doc(blocks=blocks)


def _rows_shown(preview: RowPreview) -> str:
    if len(preview.rows) == preview.train_rows:
        return "All training rows"
    where = "all training rows" if preview.is_all else "the first rows of the hub"
    return f"{pluralize(len(preview.rows), 'row')}, spread over {where}"


def _histogram(preview: RowPreview) -> Grid:
    read = [length.read for length in preview.lengths]
    learned = [length.learned for length in preview.lengths]
    longest = max([*read, *learned], default=0)
    step = max(1, math.ceil((longest + 1) / _BARS))
    ranges = [range(first, first + step) for first in range(0, longest + 1, step)]
    bars_read = _bars(_rows_in(ranges, read))
    bars_learned = _bars(_rows_in(ranges, learned))
    looked_at = pluralize(len(preview.lengths), "training row")
    rows = []
    for place, part in enumerate(ranges):
        tokens = f"{part[0]}–{part[-1]}"
        rows.append((tokens, *bars_read[place], *bars_learned[place]))
    return Grid(
        columns=("tokens", "read", "rows", "learned", "rows "),
        rows=rows,
        right={"rows", "rows "},
        whole={"tokens", "read", "learned"},
        caption=f"Lengths of {looked_at}, before anything is cut",
    )


def _rows_in(ranges: Sequence[range], lengths: Sequence[int]) -> list[int]:
    return [sum(length in part for length in lengths) for part in ranges]


def _bars(rows: Sequence[int]) -> list[tuple[Cell, str]]:
    """Return the bar and the number of rows of each range."""
    most = max([*rows, 1])
    bars: list[tuple[Cell, str]] = []
    for number in rows:
        bar = Bar(((DONE, number / most),), words=pluralize(number, "row")) if number else ""
        bars.append((bar, count(number)))
    return bars


def _notes(preview: RowPreview) -> list[str]:
    job = preview.job
    rows = max(1, len(preview.lengths))
    read_cut = sum(length.read_is_cut for length in preview.lengths)
    learned_cut = sum(length.learned_is_cut for length in preview.lengths)
    cut = {
        _limit("max_source_length", job.max_source_length): read_cut,
        _limit("max_target_length", job.max_target_length): learned_cut,
    }
    notes = [
        f"{option} cuts {count(number)} of them ({percent(number / rows)})."
        for option, number in cut.items()
    ]
    if preview.overlap:
        notes.append(
            "Evaluation rows that are training rows too make the figures of the evaluation better "
            "than those of new rows. Remove the repeated rows, or name other rows by eval."
        )
    return notes


def _limit(name: str, value: int | None) -> str:
    return f"{name}, left open," if value is None else f"{name}={value}"
