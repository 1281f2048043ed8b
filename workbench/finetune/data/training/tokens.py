"""Tokenized rows in a file. A rank tokenizes its share and sends the rows to all ranks."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from workbench.agent.rank import collectives as ranks
from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.rows import Row

_AT_ONCE = 2048  # examples that a rank tokenizes between two exchanges
_COLUMNS = ("input_ids", "labels", "position_ids")
_BYTES = array("i").itemsize


class TokenRows(Sequence[Row]):
    """Rows in an unnamed file that is deleted with the process.

    A row needs some 20 bytes of memory.
    """

    def __init__(self, rows: Iterable[Row], folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the rows
        self._starts = array("q", [0])
        self._sizes = array("i")
        self._width = 0
        for row in rows:
            columns = [row[name] for name in _COLUMNS if name in row]
            self._width = len(columns)
            content = array("i")
            for column in columns:
                content.extend(column)
                self._sizes.append(len(column))
            self._file.write(content)
            self._starts.append(self._starts[-1] + len(content))
        self._file.flush()

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]  # slices are not used
        first = self._starts[number]
        length = self._starts[number + 1] - first
        written = os.pread(self._file.fileno(), length * _BYTES, first * _BYTES)
        content = array("i", written)
        sizes = self._sizes[number * self._width : (number + 1) * self._width]
        row = {}
        begin = 0
        # Rows that are only a prompt have fewer columns.
        for name, size in zip(_COLUMNS, sizes, strict=False):
            row[name] = content[begin : begin + size].tolist()
            begin += size
        return row

    @property
    def lengths(self) -> torch.Tensor:
        """Numbers of input tokens and learned tokens, shape [rows, 2]."""
        sizes = torch.frombuffer(self._sizes, dtype=torch.int32)
        return sizes.view(len(self), self._width)[:, :2]


def shared_rows(
    examples: Sequence[Example], make: Callable[[Sequence[Example], int], Sequence[Row]]
) -> Iterator[Row]:
    """Tokenize a share of the examples per rank, and yield all rows in order on every rank.

    Every rank must consume all rows.
    """
    for begin in range(0, len(examples), _AT_ONCE * ranks.world_size()):
        first = begin + _AT_ONCE * ranks.rank()
        mine = make(examples[first : first + _AT_ONCE], first + 1)
        sent = json.dumps(mine).encode()
        for part in ranks.gather_bytes(sent):
            yield from json.loads(part)


def packed(rows: Iterable[Row], most: int) -> Iterator[Row]:
    """Pack rows in order up to `most` tokens. Positions restart with every text.

    Example:
        >>> first = {"input_ids": [5, 6], "labels": [-100, 6]}
        >>> second = {"input_ids": [7], "labels": [-100]}
        >>> list(packed([first, second], 4))
        [{'input_ids': [5, 6, 7], 'labels': [-100, 6, -100], 'position_ids': [0, 1, 0]}]
    """
    made: dict[str, list[int]] = {
        "input_ids": [],
        "labels": [],
        "position_ids": [],
    }
    for row in rows:
        length = len(row["input_ids"])
        before = len(made["input_ids"])
        if before and before + length > most:
            yield made
            made = {"input_ids": [], "labels": [], "position_ids": []}
        made["input_ids"].extend(row["input_ids"])
        made["labels"].extend(row["labels"])
        made["position_ids"].extend(range(length))
    yield made
