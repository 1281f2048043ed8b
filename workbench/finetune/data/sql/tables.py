"""Tables of questions, and queries on them in an in-memory SQLite with limits on time and rows.

Tables are untrusted. Names are bound by position and values as parameters, so that no text of a
table becomes SQL.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass

from workbench.base.errors import ConfigError
from workbench.finetune.data.sql.query import AGGREGATES, OPERATORS, Query, Value, fold

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
    query: Query, table: SqlTable, *, timeout_s: float = 2.0, max_rows: int = 10_000
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
    if query.aggregate not in AGGREGATES or any(
        c.operator not in OPERATORS for c in query.conditions
    ):
        raise ConfigError(f"the query {query!r} has an aggregate or operator that WikiSQL has not")
    selected = f"c{_position(query.select, table)}"
    sql = (
        f"SELECT {query.aggregate}({selected}) FROM t"
        if query.aggregate
        else f"SELECT {selected} FROM t"
    )
    clauses = []
    parameters = []
    for condition in query.conditions:
        position = _position(condition.column, table)
        clauses.append(f"c{position} {condition.operator} ?")
        real = table.types[position] == "real"
        parameters.append(
            _as_number(condition.value, condition.column) if real else condition.value
        )
    return sql + (" WHERE " + " AND ".join(clauses) if clauses else ""), parameters


def _position(column: str, table: SqlTable) -> int:
    position = table.column(column)
    if position is None:
        raise ConfigError(
            f"table {table.id!r} has no column {column!r}; it has: {', '.join(table.header)}"
        )
    return position


def _fill(connection: sqlite3.Connection, table: SqlTable) -> None:
    # The collation decides =, <, > and MIN, MAX of text. SQLite's NOCASE only folds ASCII letters.
    connection.create_collation("folded", _compare)
    columns = ", ".join(
        f"c{i} {'NUMERIC' if kind == 'real' else 'TEXT COLLATE folded'}"
        for i, kind in enumerate(table.types)
    )
    connection.execute(f"CREATE TABLE t ({columns})")
    marks = ", ".join("?" * len(table.types))
    rows = (
        [_cell(c) if t == "real" else c for c, t in zip(row, table.types, strict=True)]
        for row in table.rows
    )
    connection.executemany(f"INSERT INTO t VALUES ({marks})", rows)
    connection.execute("PRAGMA query_only = ON")


def _compare(a: str, b: str) -> int:
    left = fold(a)
    right = fold(b)
    return (left > right) - (left < right)


def _cell(cell: Cell) -> Cell:
    number = read_number(cell) if isinstance(cell, str) else None
    return cell if number is None else number


def _as_number(value: Value, column: str) -> Value:
    """Return a condition's value as WikiSQL does: the text as a number, or its first number."""
    if not isinstance(value, str):
        return value
    whole = read_number(value)
    if whole is not None:
        return whole
    number = re.search(r"[-+]?\d*\.\d+|\d+", value, re.ASCII)
    if number is None:
        raise ConfigError(f"column {column!r} holds numbers; it cannot be compared with {value!r}")
    return float(number[0])
