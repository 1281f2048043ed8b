"""Tokenized rows in a file, and rows packed to longer rows."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import IO

import numpy
import torch

from workbench.base.errors import ConfigError
from workbench.finetune.data.training.rows import Row
from workbench.finetune.options.text.lengths import TextLengths

_COLUMNS = ("input_ids", "labels", "position_ids")
_BYTES = array("i").itemsize
_PIECE = 1 << 16

FORMAT = "tokens-3"
"""Version of the file's form: a header, the rows' integers, and the sizes of the columns."""
_TEXTS = [field.name for field in fields(TextLengths)]
# Integers, sizes, columns of a row, rows before packing, and the lengths of the texts.
_COUNTS = struct.Struct(f"<{4 + len(_TEXTS)}Q")
_HEADER_BYTES = len(FORMAT) + hashlib.sha256().digest_size + _COUNTS.size


class TokenRows(Sequence[Row]):
    """Rows in a file. A row needs some 20 bytes of memory."""

    def __init__(
        self,
        rows: Iterable[Row],
        folder: Path,
        texts: Callable[[], TextLengths] = TextLengths,
        *,
        name: str = "",
    ) -> None:
        """Write rows to a file of this name, or to an unnamed file that ends with the process.

        `texts` returns the lengths of the rows' texts, and is called after the last row.
        """
        self.kept = False
        """Whether an earlier run made the rows."""
        # The file is open as long as the rows are used.
        if name:
            file: IO[bytes] = (folder / name).open("w+b")
        else:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        file.write(bytes(_HEADER_BYTES))
        digest = hashlib.sha256()
        integers = 0
        sizes = array("i")
        width = 0
        self.samples = 0
        """Number of rows; of packed rows, the number of rows in them."""
        for row in rows:
            # A row begins at position 0.
            self.samples += row["position_ids"].count(0) if "position_ids" in row else 1
            columns = [row[name] for name in _COLUMNS if name in row]
            width = len(columns)
            content = array("i")
            for column in columns:
                content.extend(column)
                sizes.append(len(column))
            file.write(content)
            digest.update(content)
            integers += len(content)
        file.write(sizes)
        digest.update(sizes)
        self.texts = texts()
        """Lengths of the texts of the rows."""
        counts = _COUNTS.pack(integers, len(sizes), width, self.samples, *astuple(self.texts))
        digest.update(counts)
        file.seek(0)
        file.write(FORMAT.encode() + digest.digest() + counts)
        file.flush()
        self._use(file, sizes, width)

    @classmethod
    def read(cls, path: Path, *, verified: bool = False) -> TokenRows | None:
        """Open a file that `copy_to` wrote; return None for a missing or damaged file.

        `verified`: another rank of the pod compares the digest of the file.
        """
        try:
            file = path.open("rb")
        except OSError:
            return None
        try:
            sizes, width, samples, texts = _checked(file, verified=verified)
        except (OSError, EOFError, ValueError, struct.error):
            file.close()
            return None
        rows = cls.__new__(cls)
        rows.kept = True
        rows.samples = samples
        rows.texts = texts
        rows._use(file, sizes, width)
        return rows

    def copy_to(self, path: Path) -> None:
        """Copy the file to a path as a whole or not at all."""
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as copy:
            try:
                begin = 0
                while piece := os.pread(self._file.fileno(), _PIECE, begin):
                    copy.write(piece)
                    begin += len(piece)
                copy.flush()
                Path(copy.name).replace(path)
            except OSError:
                Path(copy.name).unlink(missing_ok=True)
                raise

    def _use(self, file: IO[bytes], sizes: array[int], width: int) -> None:
        self._file = file
        self._sizes = sizes
        self._width = width
        every = numpy.frombuffer(sizes, dtype=numpy.int32).reshape(-1, width or 1)
        self._ends = every.sum(axis=1, dtype=numpy.int64).cumsum()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]  # slices are not used
        first = int(self._ends[number - 1]) if number else 0
        length = int(self._ends[number]) - first
        begin = _HEADER_BYTES + first * _BYTES
        written = os.pread(self._file.fileno(), length * _BYTES, begin)
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
    def bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def lengths(self) -> torch.Tensor:
        """Numbers of input tokens and learned tokens, shape [rows, 2]."""
        sizes = torch.frombuffer(self._sizes, dtype=torch.int32)
        return sizes.view(len(self), self._width)[:, :2]


def _checked(file: IO[bytes], *, verified: bool) -> tuple[array[int], int, int, TextLengths]:
    """Return sizes of columns, number of columns, number of samples and lengths of texts.

    Raise ValueError for damage; if `verified`, only for another size.
    """
    header = file.read(_HEADER_BYTES)
    counts = header[-_COUNTS.size :]
    integers, count, width, samples, *texts = _COUNTS.unpack(counts)
    if os.fstat(file.fileno()).st_size != _HEADER_BYTES + (integers + count) * _BYTES:
        raise ValueError("the file has another size than its header states")
    digest = hashlib.sha256()
    left = 0 if verified else integers * _BYTES
    while left:
        piece = file.read(min(_PIECE, left))
        digest.update(piece)
        left -= len(piece)
    file.seek(_HEADER_BYTES + integers * _BYTES)
    sizes = array("i")
    sizes.fromfile(file, count)
    digest.update(sizes)
    digest.update(counts)
    if not verified and header != FORMAT.encode() + digest.digest() + counts:
        raise ValueError("the content is not the written content")
    return sizes, width, samples, TextLengths(**dict(zip(_TEXTS, texts, strict=True)))


def shuffled(rows: TokenRows, most: int, seed: int) -> Iterator[Row]:
    """Yield rows in random order. Raise ConfigError for a row of more than `most` tokens."""
    longest = int(rows.lengths[:, 0].max())
    if longest > most:
        raise ConfigError(
            f"tokens_per_micro_batch is {most}, and a row has {longest} tokens; use {longest} or "
            "more, or shorten rows by max_source_length and max_target_length"
        )
    generator = torch.Generator().manual_seed(seed)
    for number in torch.randperm(len(rows), generator=generator).tolist():
        yield rows[number]


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
