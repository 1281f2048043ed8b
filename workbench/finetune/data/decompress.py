"""Open files of rows, decompress compressed files, and convert other encodings to UTF-8."""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import io
import lzma
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from workbench.base.errors import ConfigError
from workbench.base.words import size

_OPENERS: Mapping[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
PACKED = tuple(_OPENERS)
"""Suffixes of compressed files, decompressed while reading."""
_BROKEN = (EOFError, lzma.LZMAError, zlib.error, OSError)
# Real rows compress 3 to 30 times. Content that expands far more would only fill the disk.
_FREE_BYTES = 256 << 20
_MOST_TIMES = 300
_CHUNK = 1 << 18
# First bytes of files that are no text, with what to do.
_NO_TEXT = (
    (b"\x1f\x8b", "is compressed by gzip: let the name end in .gz, as in rows.jsonl.gz"),
    (b"BZh", "is compressed by bzip2: let the name end in .bz2, as in rows.jsonl.bz2"),
    (b"\xfd7zXZ", "is compressed by xz: let the name end in .xz, as in rows.jsonl.xz"),
    (b"\x28\xb5\x2f\xfd", "is compressed by zstd: unpack the file, or pack it as .gz"),
    (b"PK\x03\x04", "is a zip archive or a spreadsheet: unpack it, or save it as CSV"),
    (b"PAR1", "is a Parquet file: let the name end in .parquet"),
    (b"ARROW1", "is an Arrow file: save it as Parquet"),
    (b"%PDF", "is a PDF: write its texts as rows of a .jsonl file"),
    (b"SQLite format 3", "is a database: save a query as CSV or Parquet"),
    (b"version https://git-lfs", "is a pointer of git-lfs: run `git lfs pull` in the folder"),
    *(
        (mark, "is a page of a website: download the file itself, after a login if asked")
        for mark in (b"<!doctype html", b"<!DOCTYPE html", b"<html")
    ),
)
# UTF-32 first: its four bytes begin with UTF-16's mark.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def check_encoding(encoding: str) -> str:
    """Return the encoding if Python knows the name; raise ConfigError otherwise."""
    try:
        "".encode(encoding)
    except LookupError as error:
        raise ConfigError(
            f"dataset encoding {encoding!r} is not known; give a name that Python knows, as in "
            "'utf-8', 'cp1252' or 'utf-16'"
        ) from error
    return encoding


def open_rows(path: Path, encoding: str | None = None) -> BinaryIO:
    """Open a file of rows as UTF-8. Without `encoding`, a byte order mark decides.

    Raises:
        OSError: The file cannot be opened. Reading raises OSError for broken or far too large
            compressed content, and for bytes of another encoding.
    """
    # Opening a pipe without a writer would block for ever.
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    is_packed = path.suffix.lower() in _OPENERS
    file: IO[bytes] = io.BufferedReader(_Unpacked(path), _CHUNK) if is_packed else path.open("rb")
    beginning = file.read(max(len(mark) for mark, _ in _NO_TEXT))
    file.seek(0)
    for mark, problem in _NO_TEXT:
        if beginning.startswith(mark):
            raise OSError(f"the content of the file {problem}")
    if encoding is None:
        encoding = next((name for mark, name in _MARKS if beginning.startswith(mark)), None)
    if encoding is None:
        return file  # type: ignore[return-value]
    return io.BufferedReader(_Recoded(file, encoding), _CHUNK)


class _Unpacked(io.RawIOBase):
    """Content of a compressed file."""

    def __init__(self, path: Path) -> None:
        self._file = _OPENERS[path.suffix.lower()](path)
        self._most = _FREE_BYTES + _MOST_TIMES * path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except _BROKEN as error:
            raise OSError(
                f"the compressed content is broken: {error}; was the file copied whole?"
            ) from error
        if self._file.tell() > self._most:
            raise OSError(
                f"the file unpacks to more than {size(self._most)}; if so much is right, unpack "
                "the file yourself"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Recoded(io.RawIOBase):
    """Text of another encoding, converted to UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._file = file
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._ready = b""
        self._taken = 0
        self._given = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def seek(self, offset: int, whence: int = 0) -> int:
        """Return to the beginning. Readers of rows need no other position."""
        if offset or whence:
            raise io.UnsupportedOperation("a reader can return only to the beginning")
        self._file.seek(0)
        self._decoder.reset()
        self._ready = b""
        self._taken = 0
        self._given = 0
        return 0

    def readinto(self, buffer: Any) -> int:
        ended = False
        while not self._ready and not ended:
            data = self._file.read(_CHUNK)
            ended = not data
            try:
                self._ready = self._decoder.decode(data, ended).encode()
            except UnicodeError as error:
                raise OSError(
                    f"the text is not {self._encoding}: {error}, counted from byte {self._taken}; "
                    "name the right encoding, as in encoding='cp1252', or save the file as UTF-8"
                ) from error
            self._taken += len(data)
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        self._given += len(taken)
        return len(taken)

    def close(self) -> None:
        self._file.close()
        super().close()
