"""Convert rows and tables, line by line, to files for the trainer and the judge of predictions.

The same rows are held out for evaluation in every place.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from random import Random

from workbench.base.errors import ConfigError
from workbench.base.files import is_there, user_path
from workbench.base.words import pluralize
from workbench.finetune.data.column_checks import RowTally, Written, written
from workbench.finetune.data.forms.messages import chat_key, has_content, unpacked
from workbench.finetune.data.forms.table import PROMPT_KEYS, UNNAMED, question_form
from workbench.finetune.data.lines import EmptyField, read_lines
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import (
    Example,
    Refusal,
    UnknownForm,
    any_row,
    prepared_row,
    renamed,
)
from workbench.finetune.data.shares import first_rows
from workbench.finetune.data.sources.read import read_rows
from workbench.finetune.data.tasks import TASK, Table

_NAME_WORDS = 3  # most words in the name of a column
_FIRST_ROWS = 10_000  # searched for an empty cell


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    share: float | None = None
    """Share of rows for evaluation; None if evaluation rows have a separate source."""
    limit: int | None = None
    """Largest number of training rows."""
    part: str | None = None
    """Share of the source's rows to use at all, from the first, such as `10%`; None for all."""
    seed: int = 0

    @property
    def most(self) -> int | None:
        """Number of rows needed from the source; None for all.

        Example:
            >>> Split(share=0.05, limit=1000).most, Split(limit=1000).most, Split(share=0.05).most
            (1053, 1000, None)
        """
        if self.limit is None or self.share is None:
            return self.limit
        return math.ceil(self.limit / (1 - self.share))

    def held_out(self, rows: int, name: str) -> Iterator[bool]:
        """Yield whether a row is for evaluation. At least one row is, and at least one is not."""
        assert self.share is not None
        if rows < 2:
            raise ConfigError(
                f"{name} has {pluralize(rows, 'row')}, too few to hold a share out to evaluate on: "
                "give at least 2, or name rows to evaluate on"
            )
        # Rows beyond the limit of training rows are for evaluation too.
        beyond_limit = 0 if self.limit is None else rows - self.limit
        held = max(1, round(rows * self.share), beyond_limit)
        return chosen(rows, min(held, rows - 1), self.seed)


def chosen(rows: int, most: int, seed: int | str) -> Iterator[bool]:
    """Choose `most` of `rows` rows at random, with selection sampling (Knuth's algorithm S).

    Example:
        >>> list(chosen(5, 2, seed=0))
        [False, False, True, True, False]
    """
    random = Random(seed)
    for left in range(rows, 0, -1):
        taken = random.random() * left < most
        most -= taken
        yield taken


def read_tables(
    path: Path, run: Path | None = None, *, encoding: str | None = None
) -> Iterator[Table]:
    """Yield the tables of a tables file. Links in a run directory are not followed.

    Raises:
        ConfigError: A line is invalid; the message names line and field.
    """
    for where, data in read_lines(path, run, encoding=encoding):
        yield TASK.table(data, where)


def write_files(  # noqa: PLR0913
    folder: Path,
    *,
    train: Sequence[Path],
    evaluation: Sequence[Path] = (),
    tables: Sequence[Path] = (),
    kept: Sequence[Path] | None = None,
    columns: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    encoding: str | None = None,
    split: Split | None = None,
    drop_empty: bool = False,
    given: Mapping[str, object] | None = None,
    refusal: Refusal = any_row,
    reader: RowReader = ANSWER_ROWS,
) -> Written:
    # Keep only headers: the rows of the release's tables need hundreds of megabytes.
    headers: dict[str, Table] = {}
    for path in tables:
        for table in read_tables(path, encoding=encoding):
            headers[table.id] = TASK.without_rows(table)
    wanted = columns or {}

    def lines(paths: Sequence[Path], tally: RowTally, most: int | None = None) -> Iterator[str]:
        for where, data in islice(_every_row(paths, wanted, ignore, encoding), most):
            row = read_row(data, where, columns, headers or None, refusal=refusal, tally=tally)
            if row is not None:
                yield row.to_json()
        tally.check_end(", ".join(str(path) for path in paths[:3]))

    def table_lines(paths: Sequence[Path]) -> Iterator[str]:
        for path in paths:
            for table in read_tables(path, encoding=encoding):
                yield table.to_json()

    # Write the rows, then the tables on which predictions are run.
    name = ", ".join(str(path) for path in train[:3])
    learned = RowTally(ignore, reader, given=given, drop_empty=drop_empty)
    judged = RowTally(ignore, reader, given=given, drop_empty=drop_empty)
    own = lines(evaluation, judged) if evaluation else None
    most = None
    if split is not None and split.part is not None:
        # Rows outside the share are counted, and neither checked nor kept.
        count = sum(1 for path in train for _ in read_rows(path, wanted, encoding=encoding))
        most = first_rows(count, split.part)
    rows = lines(train, learned, most)
    counts = write_parts(folder, rows, own, split or Split(), name)
    kept = tables if kept is None else kept
    if kept:
        write_lines(folder / "tables.jsonl", table_lines(kept))
    return written(counts, learned, judged, name)


def _every_row(
    paths: Sequence[Path],
    columns: Mapping[str, str],
    ignore: Collection[str],
    encoding: str | None,
) -> Iterator[tuple[str, object]]:
    """Yield place and value of the rows of several files."""
    for path in paths:
        is_empty = True
        for where, data in read_rows(path, columns, ignore=ignore, encoding=encoding):
            yield where, data
            is_empty = False
        if is_empty:
            raise ConfigError(f"the dataset file {path} has no row; write at least 1 row")


def read_row(
    data: object,
    where: str,
    columns: Mapping[str, str] | None = None,
    tables: Mapping[str, Table] | None = None,
    *,
    refusal: Refusal = any_row,
    tally: RowTally,
) -> Example | None:
    """Convert a row to the trainer's form and count the row; None for a row left out."""
    columns = columns or {}
    tally.check(data, columns, where)
    if tally.is_unlearned(data, where):
        return None
    fields = tally.without_ignored(data)
    if columns:
        fields = renamed(fields, columns, where)
    if isinstance(fields, Mapping):
        fields = unpacked(fields, where)
    try:
        row = tally.reader.read(fields, where, tables)
    except EmptyField as error:
        tally.leave_out(str(error))
        return None
    except UnknownForm as error:
        file = str(tally.given.get("train", ""))
        dataset = {**tally.given, "columns": dict(error.columns)}
        empty = ""
        if _has_empty_cells(file, error.columns.values()):
            dataset["drop_empty"] = True
            empty = ", without rows with an empty question or answer"
        # Questions of a form are names of columns too, so both lines are given.
        headless = ""
        if isinstance(fields, Mapping) and _may_be_headless(file, fields):
            names = ["source", "target", *(f"column_{n}" for n in range(3, len(fields) + 1))]
            headless = (
                ". If the first line of the file is a row, and not the names of columns: "
                f"dataset=pandas.read_csv({file!r}, names={names[: len(fields)]})"
            )
        raise ConfigError(f"{error} in the dataset{empty}: dataset={dataset}{headless}") from error
    if tally.drops(row):
        tally.leave_out(f"{where}: the answer is empty")
        return None
    why = refusal(row)
    if why:
        raise ConfigError(f"{where} {why}{_made_a_chat(fields, row)}")
    tally.take(data, columns, fields, row, where)
    return row


def _has_empty_cells(file: str, columns: Collection[str]) -> bool:
    """Return whether the first rows of a table have an empty cell in some columns.

    Columns that are still to be named may be any.
    """
    path = user_path(file)
    if path.suffix.lower() not in (".csv", ".tsv") or not is_there(path):
        return False
    first = islice(read_rows(path, {}), _FIRST_ROWS)
    return any(
        isinstance(row, Mapping)
        and not all(has_content(row.get(name)) for name in (row if UNNAMED in columns else columns))
        for _, row in first
    )


def _may_be_headless(file: str, row: Mapping[object, object]) -> bool:
    """Return whether the names of a table's columns may be a row."""
    if ".csv" not in file or len(row) < 2:
        return False
    return any(
        str(name).rstrip().endswith((".", "!", "?")) or len(str(name).split()) > _NAME_WORDS
        for name in row
    )


def _made_a_chat(fields: object, row: Example) -> str:
    """Return advice for a question that other columns made a chat; empty for other rows."""
    form = question_form(fields) if isinstance(fields, Mapping) else None
    if not row.messages or form is None or not isinstance(fields, Mapping):
        return ""
    names = [name for name in PROMPT_KEYS if has_content(fields.get(name))]
    if not names or chat_key(fields) or not isinstance(fields[form.asks], str):
        return ""
    return (
        f". The row is a chat because of {' and '.join(map(repr, names))}. To train without "
        f"on purpose, add 'ignore': {names} to the dataset's options"
    )


def write_parts(
    folder: Path,
    train: Iterator[str],
    evaluation: Iterator[str] | None,
    split: Split,
    name: str,
) -> tuple[int, int]:
    """Write training and evaluation rows.

    Without evaluation rows, hold out a share of the training rows.
    """
    if evaluation is not None:
        trained = write_lines(folder / "train.jsonl", islice(train, split.limit))
        return trained, write_lines(folder / "eval.jsonl", evaluation)
    every = folder / "every.jsonl"
    rows = write_lines(every, islice(train, split.most))
    held_out = 0
    with (
        every.open("rb") as lines,
        (folder / "train.jsonl").open("wb") as to,
        (folder / "eval.jsonl").open("wb") as of,
    ):
        for line, is_held in zip(lines, split.held_out(rows, name), strict=True):
            if is_held:
                of.write(line)
                held_out += 1
            else:
                to.write(line)
    every.unlink()
    return rows - held_out, held_out


def mix_files(
    target: Path,
    files: Sequence[Path],
    rows: Sequence[int],
    takes: Sequence[int],
    seed: int,
) -> int:
    """Spread `takes` lines of every file evenly over a target file, in the order of each file."""

    def lines(number: int) -> Iterator[tuple[float, int, bytes]]:
        taken = chosen(rows[number], takes[number], f"{seed}-{number}")
        place = 0
        with files[number].open("rb") as file:
            for line, is_taken in zip(file, taken, strict=True):
                if is_taken:
                    yield place / takes[number], number, line
                    place += 1

    with target.open("wb") as to:
        streams = [lines(number) for number in range(len(files))]
        for _, _, line in heapq.merge(*streams):
            to.write(line)
    return sum(takes)


def join_files(folder: Path, reader: RowReader) -> Mapping[str, int]:
    """Change the written rows as the reader needs for all rows together; return its remarks."""
    train = folder / "train.jsonl"
    evaluation = folder / "eval.jsonl"
    change = reader.joined(chain(_written_rows(train), _written_rows(evaluation)))
    if change is not None:
        for path in (train, evaluation):
            joined = path.with_suffix(".joined")
            write_lines(joined, (row.to_json() for row in map(change, _written_rows(path))))
            joined.replace(path)
    return reader.remarks(_written_rows(train))


def _written_rows(path: Path) -> Iterator[Example]:
    with path.open("rb") as lines:
        for line in lines:
            yield prepared_row(json.loads(line))


def write_lines(target: Path, lines: Iterable[str]) -> int:
    """Write lines and return their number."""
    count = 0
    # The newline is fixed so that the same options write the same bytes on every platform.
    with target.open("w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(line + "\n")
            count += 1
    return count
