"""Read rows of files in any format, with their places. A child reads Parquet and saved datasets."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TextIO

from workbench.base import entries
from workbench.base.child import replies
from workbench.base.errors import ConfigError, require_package
from workbench.base.files import is_folder, is_there
from workbench.base.json_values import parse_json
from workbench.finetune.data.columns import possible_columns
from workbench.finetune.data.decompress import PACKED, open_rows
from workbench.finetune.data.forms.messages import TOOL_KEYS, TURN_KEYS, without_nulls
from workbench.finetune.data.forms.table import FIELDS
from workbench.finetune.data.lines import MAX_LINE_BYTES, NOT_UTF8, no_constant, read_lines

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files of rows. A file with another suffix is read as JSON Lines."""
ENDS = tuple(
    f"{end}{packed}"
    for end in FORMATS
    for packed in ("", *PACKED)
    if end != ".parquet" or not packed
)
"""Suffixes of `FORMATS`, also with the suffixes of compressed files."""
_DOCUMENTS = (".pdf", ".docx", ".doc", ".html", ".htm", ".xml", ".yaml", ".yml", ".py")
# Unsupported formats of rows, and a remedy.
_OTHERS = {
    **dict.fromkeys(
        (".xlsx", ".xls", ".ods"), "is a spreadsheet, which is not read: save it as CSV (UTF-8)"
    ),
    **dict.fromkeys(
        (".zip", ".zst", ".7z", ".tgz"),
        "is an archive that is not read: unpack it, or pack it as .gz",
    ),
    **dict.fromkeys(
        (".arrow", ".feather", ".orc"), "is a table that is not read: save it as Parquet"
    ),
    **dict.fromkeys(
        (".ipynb",), "is a notebook, not rows: run it, and name the file of rows that it writes"
    ),
    **dict.fromkeys(
        _DOCUMENTS, "is a document that is not read: write its texts as rows of a .jsonl file"
    ),
    **dict.fromkeys(
        (".db", ".sqlite", ".sqlite3"),
        "is a database that is not read: save a query as CSV or Parquet",
    ),
    **dict.fromkeys(
        (".pkl", ".pickle"),
        "is a pickle, which may run code and is not read: save it as Parquet or JSON",
    ),
}
UNREAD = frozenset(_OTHERS) - {".ipynb", *_DOCUMENTS}
"""Suffixes of files that may hold rows, and are not read."""
_PLAIN = (
    'is plain text, and rows are needed: write each text as a line {"text": "…"} of a .jsonl file'
)
_NESTED = (*TURN_KEYS, *TOOL_KEYS, "input", "preferred_output", "non_preferred_output")
"""Fields that may hold turns or schemas, whose objects have every key in a table."""
_FIRST_ROWS = 1000  # rows that name the columns of a file without a line of names
_DELIMITERS = (",", ";", "\t", "|")
_NAMED_DELIMITER = re.compile(r'"?sep=(.)"?\r?\n')  # a line of Excel's above the names
_LONGEST_NAMING = 16
_CHUNK = 1 << 20
_DECODER = json.JSONDecoder()
_LOOK = 4096  # letters to search for the first one that is not whitespace


def is_saved(path: Path) -> bool:
    """Return whether a folder is a dataset that `save_to_disk` of `datasets` wrote."""
    return is_folder(path) and is_there(path / "state.json")


def format_of(path: Path) -> str:
    """Return the suffix for the format of rows, without the suffix of the compression.

    Example:
        >>> format_of(Path("rows.CSV.gz")), format_of(Path("rows.gz")), format_of(Path("rows"))
        ('.csv', '', '')
    """
    name = path.name.lower()
    packed = next((end for end in PACKED if name.endswith(end)), "")
    return Path(name.removesuffix(packed)).suffix


def refuse_other(path: Path, encoding: str | None = None) -> None:
    """Raise ConfigError for an unsupported format, and for `encoding` of a file without text."""
    why = _OTHERS.get(format_of(path))
    if why:
        raise ConfigError(f"the dataset file {path} {why}")
    if encoding is not None and (is_folder(path) or format_of(path) == ".parquet"):
        raise ConfigError(
            f"dataset encoding is for files of text, and {path} is not text: drop encoding"
        )
    if format_of(path) == ".txt" and not _begins_with_object(path):
        raise ConfigError(f"the dataset file {path} {_PLAIN}")


def read_rows(
    path: Path,
    columns: Mapping[str, str],
    *,
    ignore: Collection[str] = (),
    encoding: str | None = None,
) -> Iterator[tuple[str, object]]:
    """Yield place and value of a file's rows.

    Of Parquet and saved datasets, only the columns in `columns` are read, if given, and the telling
    columns that are not in `ignore`. All other columns have the value None. Every row of a JSON
    file has the known columns of the file's first rows.
    """
    if is_folder(path) or path.suffix.lower() == ".parquet":
        wanted = {"columns": sorted({*columns.values()}), "ignore": sorted(ignore)}
        request = {"saved" if is_folder(path) else "parquet": str(path), **wanted}
        rows = child_rows(request, f"the dataset file {path}")
        # The names of all columns come first, because unread columns are reported.
        names: Any = next(rows, ())
        for number, row in enumerate(rows, 1):
            whole = table_row(row, columns)
            yield (
                f"{path.name}, row {number}",
                {**dict.fromkeys(names), **whole} if columns else whole,
            )
        return
    if format_of(path) in (".csv", ".tsv"):
        yield from _text_rows(path, encoding)
        return
    # A row may lack a column that other rows of the file have.
    known = {*FIELDS}
    for named in columns.values():
        known |= possible_columns(named)
    names = {}
    only: object = None
    for number, (_, data) in enumerate(islice(_text_rows(path, encoding), _FIRST_ROWS)):
        only = None if number else data
        if isinstance(data, Mapping):
            names |= dict.fromkeys(name for name in data if name in known)
    if isinstance(only, Mapping):
        _refuse_columns(only, path.name)
    for where, data in _text_rows(path, encoding):
        if isinstance(data, Mapping):
            yield where, {**data, **{name: None for name in names if name not in data}}
        else:
            yield where, data


def table_row(row: object, columns: Mapping[str, str]) -> Mapping[str, object]:
    """Return a row of a table without the null values that the table filled in for turns."""
    assert isinstance(row, Mapping)
    nested = {*_NESTED}
    for field in _NESTED:
        if field in columns:
            nested |= possible_columns(columns[field])
    made = dict(row)
    for name in nested & row.keys():
        made[name] = _lists_without_nulls(row[name])
    return made


def _lists_without_nulls(value: object) -> object:
    """Remove nulls of objects in lists. An object outside of a list keeps its keys for paths."""
    match value:
        case Mapping():
            return {key: _lists_without_nulls(each) for key, each in value.items()}
        case [*_]:
            return without_nulls(value)
    return value


def _text_rows(path: Path, encoding: str | None) -> Iterator[tuple[str, object]]:
    """Yield place and value of the rows of a text file."""
    if format_of(path) not in (".json", ".csv", ".tsv"):
        yield from read_lines(path, encoding=encoding)
        return
    try:
        with TextIOWrapper(open_rows(path, encoding), encoding="utf-8-sig", newline="") as file:
            if format_of(path) == ".json":
                yield from _json_rows(file, path, encoding)
            else:
                yield from _csv_rows(file, path)
    except OSError as error:
        raise ConfigError(
            f"the dataset file {path} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the dataset file {path} is not UTF-8: {error.reason}{NOT_UTF8}"
        ) from error


def child_rows(
    request: Mapping[str, object], what: str, limit_s: float | None = None
) -> Iterator[object]:
    """Yield rows from a child process.

    This process imports no `datasets` and holds only one row.
    """
    require_package("datasets", what, extra="worker")
    try:
        yield from replies(entries.ROW_STREAM, request=request, limit_s=limit_s)
    except ValueError as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error


def _begins_with_object(path: Path) -> bool:
    try:
        with open_rows(path) as file:
            return file.read(_LOOK).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:  # reading the rows raises the error later
        return True


def _json_rows(file: TextIO, path: Path, encoding: str | None) -> Iterator[tuple[str, object]]:
    # A list of rows may be larger than memory, so its items are read one by one.
    is_list = file.read(_LOOK).lstrip()[:1] == "["
    file.seek(0)
    if is_list:
        yield from _json_items(file, path.name)
        return
    first = "\n"
    while first and not first.strip():
        first = file.readline(MAX_LINE_BYTES)
    if _is_row(first) and file.read(MAX_LINE_BYTES).strip():
        # One object a line, despite the suffix.
        yield from read_lines(path, encoding=encoding)
    else:
        file.seek(0)
        data = _parsed(file.read(), path.name)
        lists = {}
        if isinstance(data, Mapping):
            _refuse_columns(data, path.name)
            lists = {name: value for name, value in data.items() if isinstance(value, list)}
            if len(data) > 1 and all(isinstance(value, Mapping) for value in data.values()):
                raise ConfigError(
                    f"{path.name} is an object of {len(data)} objects, and a list of rows is "
                    "needed, as in [{…}, …]"
                )
        if len(lists) > 1:
            names = ", ".join(map(repr, lists))
            raise ConfigError(
                f"{path.name} is an object of {len(lists)} lists ({names}), and a single list of "
                "rows is needed. Write every list into a separate file, and name the files as "
                "'train' and 'eval' of a dataset of kind 'files'"
            )
        # Many exports put the list under a key. One object without a list is one row.
        rows = next(iter(lists.values()), [data])
        for number, row in enumerate(rows, 1):
            yield f"{path.name}, row {number}", row


def _refuse_columns(data: Mapping[str, object], name: str) -> None:
    """Raise ConfigError for an object of columns, where rows are needed."""
    objects = [value for value in data.values() if isinstance(value, Mapping)]
    if objects and len(objects) == len(data):
        keys = list(objects[0])
        if keys and keys[0].isdigit() and all(list(each) == keys for each in objects):
            raise ConfigError(
                f"{name} is an object of columns, as pandas' to_json() writes, and rows are "
                "needed. Write df.to_json('rows.jsonl', orient='records', lines=True)"
            )
    lists = [value for value in data.values() if isinstance(value, list)]
    of_splits = {"train", "test", "validation", "eval"} & data.keys()
    if lists and len(lists) == len(data) and not of_splits:
        holds_rows = any(isinstance(cell, Mapping) for cell in lists[0])
        if lists[0] and not holds_rows and len({len(each) for each in lists}) == 1:
            raise ConfigError(
                f"{name} is an object of columns, as Dataset.to_dict() writes, and rows are "
                "needed. Write dataset.to_json('rows.jsonl')"
            )


def _json_items(file: TextIO, name: str) -> Iterator[tuple[str, object]]:
    """Yield the items of a JSON list without holding the whole list in memory."""
    text = _Text(file, name)
    text.take("[")
    if text.peek() == "]":
        text.take("]")
    else:
        yield text.value()
        while text.take(",]") == ",":
            yield text.value()
    if text.peek():
        text.fail("there is text behind the list")


class _Text:
    """Text read from the file and not yet parsed."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file = file
        self._name = name
        self._text = ""
        self._at = 0
        self._line = 1
        self._ended = False

    def peek(self) -> str:
        while True:
            letter = self._text[self._at : self._at + 1]
            if not letter:
                if not self._more():
                    return ""
            elif letter in " \t\r\n":
                self._line += letter == "\n"
                self._at += 1
            else:
                return letter

    def take(self, allowed: str) -> str:
        mark = self.peek()
        if not mark:
            self.fail("the file ends within the list: was the file copied whole?")
        if mark not in allowed:
            self.fail(f"{mark!r} stands where {' or '.join(map(repr, allowed))} must")
        self._at += 1
        return mark

    def value(self) -> tuple[str, object]:
        self.peek()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                # A number may continue in the unread part of the file.
                if end < len(self._text) or not self._more():
                    break
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MAX_LINE_BYTES or not self._more():
                    self.fail(f"the item is not JSON: {error}")
        place = f"{self._name}, line {self._line}"
        item = self._text[self._at : end]
        self._line += item.count("\n")
        self._at = end
        try:
            return place, parse_json(item, parse_constant=no_constant)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON: {error}") from error

    def fail(self, problem: str) -> NoReturn:
        raise ConfigError(
            f"{self._name}, line {self._line}: {problem}; "
            "a list of objects is needed, as in [{…}, …]"
        )

    def _more(self) -> bool:
        more = "" if self._ended else self._file.read(_CHUNK)
        self._text = self._text[self._at :] + more
        self._at = 0
        self._ended = not more
        return bool(more)


def _is_row(line: str) -> bool:
    try:
        return isinstance(parse_json(line), Mapping)
    except ValueError:
        return False


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text, parse_constant=no_constant)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error


def _csv_rows(file: TextIO, path: Path) -> Iterator[tuple[str, object]]:
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    # Spreadsheets may name the delimiter in a first line, as `sep=;`.
    named = _NAMED_DELIMITER.fullmatch(file.readline(_LONGEST_NAMING))
    if named:
        delimiter = named[1]
    else:
        delimiter = _delimiter(file, "\t" if format_of(path) == ".tsv" else ",")
        file.seek(0)
    rows = csv.reader(file, delimiter=delimiter, strict=True)
    above = 1 if named else 0
    begun = above + 1
    try:
        names = next(rows, [])
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"{path.name}, line {begun}: two columns are called {twice!r}; give them separate "
                "names"
            )
        begun = above + rows.line_num + 1
        # Errors name the line where the row begins: a cell may have several lines.
        for cells in rows:
            where = f"{path.name}, line {begun}"
            begun = above + rows.line_num + 1
            if not cells:
                continue
            if len(cells) != len(names):
                raise ConfigError(
                    f"{where} has {len(cells)} cells, and the header names {len(names)} columns"
                )
            yield where, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except csv.Error as error:
        raise ConfigError(
            f"{path.name}, line {begun}: {error}; is a quote missing? A quote within a cell is "
            'written twice: ""'
        ) from error


def _delimiter(file: TextIO, usual: str) -> str:
    """Return the delimiter that splits the first two rows into the same number of cells."""
    # Spreadsheets with a decimal comma separate columns by semicolons.
    for delimiter in dict.fromkeys([usual, *_DELIMITERS]):
        file.seek(0)
        try:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            first = list(islice((cells for cells in rows if cells), 2))
        except csv.Error:  # reading the rows raises the error with its place
            continue
        widths = {len(cells) for cells in first}
        if len(widths) == 1 and max(widths) > 1:
            return delimiter
    return usual
