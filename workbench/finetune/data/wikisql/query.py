"""WikiSQL queries as text: `SELECT AGG col FROM table WHERE col = value AND …`.

`parse(format_query(q)) == q`. Names and values have no quotes, as people write them. To avoid
ambiguity, a column gets double quotes and a value single quotes, with inner quotes doubled.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

AGGREGATES = ("", "MAX", "MIN", "COUNT", "SUM", "AVG")
"""Aggregates in the order of the original release, whose files use the index."""
OPERATORS = ("=", ">", "<")
"""Operators in the order of the original release."""
Value = str | int | float


class Condition(NamedTuple):
    column: str
    operator: str
    """One of `OPERATORS`."""
    value: Value
    """Constant; a number only if the data had a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """WikiSQL query with column names."""

    select: str
    aggregate: str = ""
    """One of `AGGREGATES`; "" for no aggregate."""
    conditions: tuple[Condition, ...] = ()

    def logical_form(self) -> object:
        """Return a hashable key that is equal for logically equal queries."""
        conditions = frozenset(
            (fold(c.column), c.operator, _value_key(c.value)) for c in self.conditions
        )
        return self.aggregate, fold(self.select), conditions


def format_query(query: Query) -> str:
    """Return the text of a query, as taught to a model."""
    aggregate = f"{query.aggregate} " if query.aggregate else ""
    text = f"SELECT {aggregate}{_column_text(query.select)} FROM table"
    conditions = []
    for condition in query.conditions:
        column = _column_text(condition.column)
        conditions.append(f"{column} {condition.operator} {_value_text(condition.value)}")
    if conditions:
        text += " WHERE " + " AND ".join(conditions)
    return text


def parse(text: str) -> Query | None:
    """Return the query of a text. Other cases of keywords count only if upper case does not parse.

    Returns:
        The query, or None if the text is not a query.

    Example:
        >>> query = parse("SELECT MAX Points FROM table WHERE Team = Ike and Co AND Year < 1990")
        >>> query.conditions[0]
        Condition(column='Team', operator='=', value='Ike and Co')
        >>> query.conditions[1:]
        (Condition(column='Year', operator='<', value=1990),)
        >>> parse("SELECT everything") is None
        True
    """
    text = text.strip()
    if len(text) > _MAX_CHARACTERS:
        return None
    return _parse(text, 0) or _parse(text, re.IGNORECASE)


def fold(text: str) -> str:
    """Return a name or value in the form for comparisons.

    Example:
        >>> fold("  Straße ½") == fold("STRASSE 1⁄2")
        True
    """
    # Case folding decomposes some letters, so normalize again.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


_MAX_CHARACTERS = 20_000
# The grammar of JSON's numbers: only text that `json` would write for a number is a number.
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][+-]?[0-9]{1,3})?")
_AGGREGATE = "|".join(filter(None, AGGREGATES))
_COLUMN = r'("(?:[^"]|"")*"|[^"\s](?:.*?\S)??)'
# A model may write extra spaces between two words. An unquoted name or value has no space at its
# end.
_HEAD = rf"SELECT +(?:({_AGGREGATE}) +)?{_COLUMN} +FROM +table(?: +WHERE +(.+))?"
_CONDITION = rf"{_COLUMN} +([=<>]) +('(?:[^']|'')*'|\S(?:.*?\S)??)(?: +AND +|\Z)"
_NOT_BARE_COLUMN = re.compile(
    rf'"|(?:{_AGGREGATE})\b|.*(?:[=<>]|\b(?:AND|FROM|WHERE)\b)', re.DOTALL
)
_NOT_BARE_VALUE = re.compile(r"'|.*\bAND\b", re.DOTALL)


def _parse(text: str, flags: int) -> Query | None:
    head = re.fullmatch(_HEAD, text, flags | re.DOTALL)
    if head is None:
        return None
    aggregate, select, rest = head.groups()
    conditions = _conditions(rest, flags) if rest else ()
    if conditions is None:
        return None
    return Query(
        select=_unquote(select, '"'), aggregate=(aggregate or "").upper(), conditions=conditions
    )


def _conditions(text: str, flags: int) -> tuple[Condition, ...] | None:
    conditions = []
    position = 0
    pattern = re.compile(_CONDITION, flags | re.DOTALL)
    while position < len(text):
        match = pattern.match(text, position)
        if match is None:
            return None
        column, operator, value = match.groups()
        conditions.append(Condition(_unquote(column, '"'), operator, _read_value(value)))
        position = match.end()
    # After a final AND, a condition is missing.
    return None if re.search(r" AND\Z", text, flags) else tuple(conditions)


def _column_text(name: str) -> str:
    return name if _is_plain(name) and not _NOT_BARE_COLUMN.match(name) else _quote(name, '"')


def _value_text(value: Value) -> str:
    if not isinstance(value, str):
        return repr(value)
    bare = _is_plain(value) and not _NOT_BARE_VALUE.match(value) and _number(value) is None
    return value if bare else _quote(value, "'")


def _is_plain(text: str) -> bool:
    return bool(text) and text == " ".join(text.split())


def _quote(text: str, mark: str) -> str:
    return mark + text.replace(mark, mark * 2) + mark


def _unquote(text: str, mark: str) -> str:
    quoted = len(text) > 1 and text[0] == mark == text[-1]
    return text[1:-1].replace(mark * 2, mark) if quoted else text


def _read_value(text: str) -> Value:
    if len(text) > 1 and text[0] == "'" == text[-1]:
        return _unquote(text, "'")
    number = _number(text)
    return text if number is None else number


def _number(text: str) -> int | float | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    number = float(text) if any(match.groups()) else int(text)
    return number if math.isfinite(number) else None


def _value_key(value: Value) -> Value:
    if not isinstance(value, str):
        return value
    folded = fold(value)
    number = _number(folded)
    return folded if number is None else number
