"""Values of the option `columns`: the name of a column, a path into a column, or a template."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import as_float
from workbench.finetune.data.lines import Fields, short

_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def value_of(row: Mapping[str, object], named: str, what: str, *, is_answer: bool = True) -> object:
    """Return the value of a column of a row, of a path within a column, or of a template.

    A column of the exact name comes first. Of a list of answers, the first one is returned.

    Args:
        row: The row.
        named: The name, the path or the template.
        what: Place and field, for errors.
        is_answer: Whether the texts of a list are answers to choose from.

    Raises:
        ConfigError: The row has no such column, a field of the template has no text, or a list of
            several texts is no list of answers.

    Example:
        >>> row = {"translation": {"en": "Hi"}, "lang": "French", "answers": {"text": ["Salut"]}}
        >>> value_of(row, "translation.en", ""), value_of(row, "answers.text", "")
        ('Hi', 'Salut')
        >>> value_of(row, "Translate {translation.en} to {lang}", "")
        'Translate Hi to French'
    """
    if named not in row and _has_braces(named):
        return _filled(row, named, what, is_answer=is_answer)
    value = _within(row, named, what, is_answer=is_answer)
    if isinstance(value, list | tuple) and all(_is_text(item) for item in value):
        return _first(value, named, what, is_answer=is_answer)
    return value


def outer_columns(named: str, present: Collection[object]) -> list[str]:
    """Return the columns read by a value of `columns`, out of those `present`.

    An unknown name is returned as given.

    Example:
        >>> outer_columns("{a.b} in {c}", ["a", "c", "d"]), outer_columns("a.b", ["a", "a.b"])
        (['a', 'c'], ['a.b'])
    """
    if named in present or not _has_braces(named):
        names = [named]
    else:
        names = [field[1] for field in _BRACES.finditer(named) if field[1]]
    return [next((head for head, _ in _heads(name) if head in present), name) for name in names]


def possible_columns(named: str) -> set[str]:
    """Return all names of columns that a value of `columns` may read.

    Example:
        >>> sorted(possible_columns("Say {a.b}"))
        ['Say {a.b}', 'a', 'a.b']
    """
    names = [named, *(field[1] for field in _BRACES.finditer(named) if field[1])]
    plain = [name for name in names if not _has_braces(name)]
    return {named, *(head for name in plain for head, _ in _heads(name))}


def _has_braces(named: str) -> bool:
    return "{" in named or "}" in named


def _heads(path: str) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of a path with the rest of the path, the longest first."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count]), ".".join(parts[count:])


def _first(value: Sequence[object], named: str, what: str, *, is_answer: bool) -> object:
    """Return the first item of a list; None for an empty list."""
    if len(value) > 1 and not is_answer:
        raise ConfigError(
            f"{what} {named!r} is a list of {len(value)}, and only the first one would be read. "
            "Join the list into one text in the rows"
        )
    return value[0] if value else None


def _within(row: Mapping[str, object], path: str, what: str, *, is_answer: bool) -> object:
    data = row
    before = ""
    while True:
        found = next(((head, rest) for head, rest in _heads(path) if head in data), None)
        if found is None:
            raise one_of(what, before + path, [f"{before}{name}" for name in data])
        head, path = found
        value = data[head]
        if not path:
            return value
        value = Fields(data, what).parsed(before + head, value)
        while isinstance(value, list | tuple):
            value = _first(value, before + head, what, is_answer=is_answer)
        if value is None:
            return None
        before += f"{head}."
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{what} {before + path!r} is a path into {before[:-1]!r}, and the value there is "
                f"{short(value)}. Name a column that holds objects, or {before[:-1]!r} itself"
            )
        data = value


def _filled(row: Mapping[str, object], template: str, what: str, *, is_answer: bool) -> str:
    def text(field: re.Match[str]) -> str:
        if field[0] in ("{{", "}}"):
            return field[0][0]
        name = field[1]
        if not name:
            raise ConfigError(
                f"{what} {template!r} has braces without a name. Write {{column}} for the text of "
                "a column, and {{ or }} for a brace"
            )
        value = value_of(row, name, f"{what} in {template!r}:", is_answer=is_answer)
        if as_float(value) is not None:
            return json.dumps(value)
        if not isinstance(value, str):
            raise ConfigError(
                f"{what} {template!r} reads {name!r}, and the value {short(value)} is no text. "
                "Fill the column in this row, or leave the row out"
            )
        return value

    return _BRACES.sub(text, template)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or as_float(value) is not None
