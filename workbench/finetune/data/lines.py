"""Read JSON lines of users and check their fields. Errors name file, line and field."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from workbench.base.errors import ConfigError
from workbench.base.files.gate import open_within
from workbench.base.json_values import as_float, parse_json
from workbench.finetune.data.decompress import open_rows

MAX_LINE_BYTES = 16 * 2**20
NOT_UTF8 = (
    "; save the file as UTF-8, or name the encoding of a dataset of kind 'files', as in "
    "encoding='cp1252'"
)


_PYTHON = re.compile(r"[\[{,:]\s*'|:\s*(None|True|False)\b")
_TRAILING = re.compile(r",\s*[}\]]")


class EmptyField(ConfigError):
    """A needed field of a row is empty. The option `drop_empty` leaves such rows out."""


def read_lines(
    path: Path, run: Path | None = None, *, encoding: str | None = None
) -> Iterator[tuple[str, object]]:
    """Yield place and value of each line of a user's or a run's JSONL file.

    Accepts CRLF, a byte order mark and blank lines.
    """
    of_run = run is not None
    number = 0
    try:
        with open_rows(path, encoding) if run is None else open_within(path, run) as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line:
                    yield from _read_line(line, f"{path.name}, line {number}", of_run=of_run)
    except OSError as error:
        raise ConfigError(
            f"the dataset file {path} cannot be read: {error.strerror or error}"
        ) from error
    if number == 0:
        raise ConfigError(f"the dataset file {path} is empty; write a JSON object on every line")


class Fields:
    """JSON object with its place, so that errors can name the file, line and field."""

    def __init__(self, data: object, where: str, path: str = ""):
        self.where = where
        self.path = path
        if not isinstance(data, Mapping):
            name = path.rstrip(".") or "the line"
            raise ConfigError(f"{where}: {name} is {short(data)}; it must be an object")
        self.data = data

    def fail(self, key: str, problem: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {self.path}{key} {problem}")

    def get(self, key: str) -> object:
        if key not in self.data:
            present = ", ".join(map(str, self.data)) or "nothing"
            raise ConfigError(
                f"{self.where}: the key {self.path + key!r} is missing; there is: {present}"
            )
        return self.data[key]

    def empty(self, key: str, problem: str = "is empty") -> NoReturn:
        """Raise the error for a needed field without content."""
        raise EmptyField(f"{self.where}: {self.path}{key} {problem}")

    def text(self, key: str) -> str:
        """Return a required text that is not empty, with collapsed whitespace."""
        value = self.get(key)
        if value is None:
            self.empty(key)
        return self.words(key, value) or self.empty(key)

    def child(self, key: str) -> Fields:
        return Fields(self.parsed(key, self.get(key)), self.where, f"{self.path}{key}.")

    def items(self, key: str) -> Sequence[object]:
        value = self.parsed(key, self.get(key))
        if not isinstance(value, list | tuple):
            self.fail(key, f"is {short(value)}; it must be a list")
        return value

    def parsed(self, key: str, value: object) -> object:
        """Return the list or object that a text contains as JSON; any other value as given."""
        if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            return parse_json(value, parse_constant=no_constant)
        except ValueError as error:
            self.fail(key, f"is {short(value)}, which is not JSON: {error}{json_advice(value)}")

    def words(self, key: str, value: object) -> str:
        """Check a text and collapse whitespace, for texts that are compared or counted."""
        if not isinstance(value, str):
            self.fail(key, f"is {short(value)}; it must be text{self._advice(key, value)}")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(key, f"is {short(value)}; half a surrogate pair is not a letter")
        return " ".join(value.split())

    def _advice(self, key: str, value: object) -> str:
        """Return advice on a value that is no text; empty if there is none."""
        match value:
            case bool():
                return '. Write the word that the model shall read or write, such as "yes"'
            case {**keys} if keys and not self.path:
                return f". A path of the option columns reads it, as in '{key}.{next(iter(keys))}'"
            case [str(), *_] if not self.path:
                return ". Join the texts, or name a list of answers in the option columns"
        return ""

    def prose(self, key: str, *, needed: bool = True) -> str:
        """Return a text as it is written; a number as JSON text.

        A text of white space alone is empty.
        """
        value = self.get(key) if needed else self.data.get(key)
        if as_float(value) is not None:
            value = json.dumps(value)
        if value is not None and self.words(key, value):
            return str(value)
        if needed:
            self.empty(key)
        return ""


def is_filled(value: object) -> bool:
    """Return whether a value has content: not null, no empty list, and not white space alone.

    Example:
        >>> is_filled(0), is_filled(" "), is_filled([]), is_filled(None)
        (True, False, False, False)
    """
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and not (isinstance(value, list | tuple | Mapping) and not value)


def json_advice(text: str) -> str:
    """Return advice on a common mistake in JSON; empty if there is none."""
    if _PYTHON.search(text):
        return (
            "; the text has quotes and words of Python, as pandas' to_csv writes lists and "
            "objects. Write the rows with df.to_json('rows.jsonl', orient='records', lines=True)"
        )
    if text.rstrip().endswith(","):
        return "; remove the comma at the end of the line: a .jsonl file has none between its rows"
    if _TRAILING.search(text):
        return "; JSON allows no comma before a closing bracket"
    return ""


def short(value: object) -> str:
    """Return a value as JSON text for an error, cut to 60 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_line(line: bytes, where: str, *, of_run: bool) -> Iterator[tuple[str, object]]:
    if not line.strip():
        return
    is_whole = line.endswith(b"\n")
    if len(line) >= MAX_LINE_BYTES and not is_whole:
        most = MAX_LINE_BYTES >> 20
        raise ConfigError(f"{where} is longer than {most} MiB; is the file JSON Lines?")
    # A broken last line is often the end of a copy that was cut.
    cut = "" if is_whole else "; the file ends within the line: was the file copied whole?"
    if b"\0" in line[:4] and not of_run:
        raise ConfigError(
            f"{where} has NUL bytes, as UTF-16 has without a byte order mark; name the encoding "
            "of a dataset of kind 'files', as in encoding='utf-16-le'"
        )
    try:
        value = parse_json(line.decode(), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        problem = f"{where} is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}"
        remedy = "" if of_run else NOT_UTF8
        raise ConfigError(problem + cut + remedy) from error
    except ValueError as error:
        advice = json_advice(line.decode())
        if line.strip() in (b"[", b"{"):
            advice = (
                "; a value is written over several lines. Name the file with the suffix .json, "
                "or write every row as an object on a line of its own"
            )
        raise ConfigError(f"{where} is not JSON: {error}{advice or cut}") from error
    if isinstance(value, list) and not of_run:
        raise ConfigError(
            f"{where} is a list, and a line is an object. Name the file with the suffix .json, or "
            "write every row of the list as a line"
        )
    yield where, value


def no_constant(word: str) -> NoReturn:
    """Raise ValueError for numbers of Python's JSON that JSON does not allow."""
    raise ValueError(f"{word} is not a JSON number; write null for a missing value")
