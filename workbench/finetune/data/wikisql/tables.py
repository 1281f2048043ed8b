"""Tables of questions, and queries on them in an in-memory SQLite with limits on time and rows.

Tables are untrusted. Names are bound by position and values as parameters, so that no text of a
table becomes SQL.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from workbench.base.errors import ConfigError
from workbench.finetune.data.wikisql.query import AGGREGATES, OPERATORS, Query, Value, fold

Cell = str | int | float | None
TYPES = ("text", "real")


@dataclass(frozen=True, kw_only=True, slots=True)
class SqlTable:
    id: str
    name: str = ""
    header: tuple[str, ...]
    """Names of the columns.

    WikiSQL sometimes repeats a name; the first column of that name counts.
    """
    types: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...] = ()
    """Cells by row and column; empty if only the columns are known."""

    def column(self, name: str) -> int | None:
        """Return the position of a column, or None. Letter case and spacing are ignored."""
        wanted = fold(name)
        return next((i for i, other in enumerate(self.header) if fold(other) == wanted), None)

    def to_json(self) -> str:
        data = {
            "id": self.id,
            "name": self.name,
            "header": self.header,
            "types": self.types,
            "rows": self.rows,
        }
        return json.dumps(data, ensure_ascii=False)


def execute(
    query: Query,
    table: SqlTable,
    *,
    timeout_s: float = 2.0,
    max_rows: int = 10_000,
) -> list[Cell]:
    """Run a query on a table with WikiSQL's semantics; return a value per row, or an aggregate.

    The type of a condition's column decides the comparison. Text is compared without letter case.
    In a `real` column, values are compared as numbers, with thousands separators removed.

    Raises:
        ConfigError: A column is missing, or the time limit is over.
    """
    sql, parameters = _statement(query, table)
    deadline = time.monotonic() + timeout_s
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.set_progress_handler(lambda: int(time.monotonic() > deadline), 1000)
        try:
            _fill(connection, table)
            return [row[0] for row in connection.execute(sql, parameters).fetchmany(max_rows)]
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"the query on table {table.id!r} could not be run: {error}"
            ) from error


def read_number(text: str) -> int | float | None:
    """Return the number in a text, also with thousands separators; None for other text.

    Example:
        >>> read_number(" 1,234.5 "), read_number("12"), read_number("12 men")
        (1234.5, 12, None)
    """
    bare = text.strip().replace(",", "")
    if re.fullmatch(r"[-+]?\d{1,18}", bare, re.ASCII):
        return int(bare)
    return float(bare) if re.fullmatch(r"[-+]?(\d{1,300}\.?\d*|\.\d+)", bare, re.ASCII) else None


def _statement(query: Query, table: SqlTable) -> tuple[str, list[Value]]:
    operators = {condition.operator for condition in query.conditions}
    if query.aggregate not in AGGREGATES or not operators <= set(OPERATORS):
        raise ConfigError(f"the query {query!r} has an aggregate or operator unknown to WikiSQL")
    selected = f"c{_position(query.select, table)}"
    if query.aggregate:
        selected = f"{query.aggregate}({selected})"
    sql = f"SELECT {selected} FROM t"
    clauses = []
    parameters = []
    for condition in query.conditions:
        position = _position(condition.column, table)
        clauses.append(f"c{position} {condition.operator} ?")
        value = condition.value
        if table.types[position] == "real":
            value = _as_number(value, condition.column)
        parameters.append(value)
    if clauses:
        sql += " WHERE " + " AND ".join(clauses)
    return sql, parameters


def _position(column: str, table: SqlTable) -> int:
    position = table.column(column)
    if position is None:
        raise ConfigError(
            f"table {table.id!r} has no column {column!r}; its columns: {', '.join(table.header)}"
        )
    return position


def _fill(connection: sqlite3.Connection, table: SqlTable) -> None:
    # The collation decides =, <, > and MIN, MAX of text. SQLite's NOCASE only folds ASCII letters.
    connection.create_collation("folded", _compare)
    columns = []
    for number, kind in enumerate(table.types):
        columns.append(f"c{number} {'NUMERIC' if kind == 'real' else 'TEXT COLLATE folded'}")
    connection.execute(f"CREATE TABLE t ({', '.join(columns)})")
    marks = ", ".join("?" * len(table.types))
    rows = (_cells(row, table.types) for row in table.rows)
    connection.executemany(f"INSERT INTO t VALUES ({marks})", rows)
    connection.execute("PRAGMA query_only = ON")


def _compare(a: str, b: str) -> int:
    left = fold(a)
    right = fold(b)
    return (left > right) - (left < right)


def _cells(row: Sequence[Cell], types: Sequence[str]) -> list[Cell]:
    """Return a row with the numbers of columns of numbers as numbers."""
    cells = []
    for cell, kind in zip(row, types, strict=True):
        is_text = kind == "real" and isinstance(cell, str)
        number = read_number(str(cell)) if is_text else None
        cells.append(cell if number is None else number)
    return cells


def _as_number(value: Value, column: str) -> Value:
    """Return a condition's value as WikiSQL does: the text as a number, or its first number."""
    if not isinstance(value, str):
        return value
    whole = read_number(value)
    if whole is not None:
        return whole
    number = re.search(r"[-+]?\d*\.\d+|\d+", value, re.ASCII)
    if number is None:
        raise ConfigError(f"column {column!r} of numbers cannot be compared with {value!r}")
    return float(number[0])
