"""Training and evaluation rows of a rank: files are read row by row, a hub dataset at once."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, overload

from workbench.base.errors import ConfigError
from workbench.base.package import file_digest
from workbench.finetune.data.reading import ANSWER_ROWS, RowReader
from workbench.finetune.data.rows import Example, prepared_row
from workbench.finetune.data.training.stream import json_line, named_rows, open_hub

if TYPE_CHECKING:
    from workbench.finetune.data.column_checks import RowTally
    from workbench.finetune.data.sources.hub import Hub

Row = Mapping[str, Sequence[int]]
"""Tokenized example: `input_ids`, and `labels` unless the row is only a prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    train: Sequence[Example]
    """Training rows; never empty."""
    eval: Sequence[Example]
    """Evaluation rows; may be empty."""
    not_read: Sequence[str] = ()
    """Columns of a hub dataset not read by any row's form."""
    empty_answers: int | None = None
    """Number of rows of a hub dataset with an empty answer; None for files, already counted."""
    overlap: int | None = None
    """Number of evaluation rows of a hub dataset that are training rows too; None for files."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """Numbers of rows of a hub dataset by what is odd about the rows."""


def load(
    train: str | None,
    evaluation: str | None,
    hub: Mapping[str, object] | None,
    reader: RowReader = ANSWER_ROWS,
) -> Rows:
    if hub is not None:
        # Imported here because the module imports all other kinds of dataset, and few jobs need it.
        from workbench.finetune.data.sources.hub import Hub

        rows = _from_hub(Hub.from_dict(hub), reader)
    elif train is not None:
        rows = Rows(train=_Lines(Path(train)), eval=_Lines(Path(evaluation)) if evaluation else [])
    else:
        raise ConfigError(
            "the job names neither a training file nor a hub dataset; prepare the dataset first"
        )
    if not rows.train:
        raise ConfigError(f"no row to train on in {train or hub}")
    return rows


def content_digest(examples: Sequence[Example]) -> str:
    """Return the SHA-256 of the rows: of their file, or of the rows of a hub dataset."""
    if isinstance(examples, _Lines):
        return file_digest(examples.path)
    digest = hashlib.sha256()
    for example in examples:
        digest.update(f"{example.to_json()}\n".encode())
    return digest.hexdigest()


class _Lines(Sequence[Example]):
    """Rows of a JSON lines file, read on access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} does not exist on the pod; was the dataset prepared and sent?"
            ) from error
        self._ends = array("q", accumulate(map(len, self._file)))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, number: int) -> Example: ...
    @overload
    def __getitem__(self, number: slice) -> list[Example]: ...
    def __getitem__(self, number: int | slice) -> Example | list[Example]:
        numbers = range(len(self))[number]
        if isinstance(numbers, int):
            return self._row(numbers)
        return [self._row(n) for n in numbers]

    def _row(self, number: int) -> Example:
        begin = self._ends[number - 1] if number else 0
        size = self._ends[number] - begin
        try:
            line = os.pread(self._file.fileno(), size, begin)
            return prepared_row(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{self.path} line {number + 1}: {error!r}"
            raise ConfigError(f"{what}; a line is an object of source, target") from error


def _from_hub(hub: Hub, reader: RowReader) -> Rows:
    """Load the rows of a hub dataset with `datasets`; version 4 and later run no dataset code."""
    from workbench.finetune.data.column_checks import written
    from workbench.finetune.data.overlap import overlap_of_rows

    learned = hub.tally(reader)
    judged = hub.tally(reader)
    train = _split_of(hub, hub.train_split, learned, is_training=True)
    if hub.eval_share is None:
        evaluation = _split_of(hub, hub.eval_split, judged, is_training=False)
    else:
        examples = train
        train = []
        evaluation = []
        held_out = hub.split.held_out(len(examples), hub.name)
        for example, is_held in zip(examples, held_out, strict=True):
            if is_held:
                evaluation.append(example)
            else:
                train.append(example)
    made = written((len(train), len(evaluation)), learned, judged, hub.name)
    return Rows(
        train=train,
        eval=evaluation,
        not_read=made.not_read,
        empty_answers=made.empty_answers,
        overlap=overlap_of_rows(train, evaluation),
        remarks={**made.remarks, **reader.remarks(train)},
    )


def _split_of(
    hub: Hub,
    split: str,
    tally: RowTally,
    *,
    is_training: bool,
) -> list[Example]:
    try:
        loaded = open_hub(hub.to_dict(), split)
    except ValueError as error:  # the message of `datasets` lists the splits
        raise ConfigError(
            f"the hub dataset {hub.name} cannot be read: {error}; eval_share=0.05 needs no split "
            "beside the training split"
        ) from error
    most = hub.most_of(len(loaded)) if is_training else None
    if most is not None:
        loaded = loaded.select(range(min(most, len(loaded))))
    read = []
    for number, raw in enumerate(named_rows(loaded)):
        # Dates, NaN and bytes are read as where the job was submitted.
        row = hub.row(json.loads(json_line(raw)), split, number, tally=tally)
        if row is not None:
            read.append(row)
    return read
