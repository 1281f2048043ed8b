"""The items of a JSON list in a file, one after the other: the whole list is never in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn, TextIO

from workbench.base.errors import ConfigError
from workbench.base.json_values import parse_json
from workbench.jobs.data.lines import MAX_LINE_BYTES, no_constant

_CHUNK = 1 << 20
_DECODER = json.JSONDecoder()


def read_items(file: TextIO, name: str) -> Iterator[tuple[str, object]]:
    text = _Text(file, name)
    text.take("[")
    if text.peek() == "]":
        text.take("]")
    else:
        yield text.value()
        while text.take(",]") == ",":
            yield text.value()
    if text.peek():
        text.fail("something stands behind the list")


class _Text:
    """What was read of the file and is not yet used."""

    def __init__(self, file: TextIO, name: str) -> None:
        self._file, self._name = file, name
        self._text, self._at, self._line, self._ended = "", 0, 1, False

    def peek(self) -> str:
        while not (rest := self._text[self._at : self._at + 1]) or rest in " \t\r\n":
            if rest:
                self._line += rest == "\n"
                self._at += 1
            elif not self._more():
                return ""
        return rest

    def take(self, allowed: str) -> str:
        mark = self.peek()
        if not mark:
            self.fail("the file ends within the list: was it copied whole?")
        if mark not in allowed:
            self.fail(f"{mark!r} stands where {' or '.join(map(repr, allowed))} must")
        self._at += 1
        return mark

    def value(self) -> tuple[str, object]:
        self.peek()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number may go on in what was not read yet
                    break
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > MAX_LINE_BYTES or not self._more():
                    self.fail(f"it is not JSON: {error}")
        place, item = f"{self._name}, line {self._line}", self._text[self._at : end]
        self._line += item.count("\n")
        self._at = end
        try:
            return place, parse_json(item, parse_constant=no_constant)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON: {error}") from error

    def fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self._name}, line {self._line}: {problem}; a list of objects is needed, as in [{{…}}, …]")

    def _more(self) -> bool:
        more = "" if self._ended else self._file.read(_CHUNK)
        self._text, self._at, self._ended = self._text[self._at :] + more, 0, not more
        return bool(more)
