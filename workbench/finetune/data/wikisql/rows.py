"""Read the queries and tables of WikiSQL's rows. Errors name place and field.

Rows have three forms with different `sql`. The JSONL of corrected editions names columns. The
original release has column numbers and a tables file. Rows of the hub contain their table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import as_int, as_str
from workbench.finetune.data.lines import Fields, short
from workbench.finetune.data.wikisql.query import AGGREGATES, OPERATORS, Condition, Query, Value
from workbench.finetune.data.wikisql.tables import TYPES, Cell, SqlTable, read_number


def query_of(row: Fields, tables: Mapping[str, SqlTable] | None) -> tuple[Query, str]:
    """Return the query of a row with `sql`, and the id of its table."""
    sql = row.child("sql")
    if row.data.get("table") is not None:
        own = table_from(
            row.parsed("table", row.data["table"]), f"{row.where}: table", named_types=False
        )
        return _indexed(sql, own, _hub_conditions(sql)), own.id
    table_id = row.text("table_id")
    table = None if tables is None else tables.get(table_id)
    if tables is not None and table is None:
        raise ConfigError(f"{row.where}: table_id {table_id!r} is not in the tables file")
    if as_str(sql.get("sel")):
        return _named(sql, table), table_id
    if table is None:
        sql.fail("sel", "names its column by number: give the tables file too (`tables`)")
    return _indexed(sql, table, sql.items("conds")), table_id


def table_from(data: object, where: str, *, named_types: bool = True) -> SqlTable:
    """Read a table in the form of the release or of the hub."""
    fields = Fields(data, where)
    header = []
    for number, column in enumerate(fields.items("header")):
        header.append(fields.words(f"header[{number}]", column))
    if not header:
        fields.fail("header", "is empty; a table has a column at least")
    types = _types(fields, len(header), needed=named_types)
    rows = []
    for number, row in enumerate(fields.items("rows")):
        rows.append(_cells(fields, number, row, len(header)))
    titles = [fields.data.get(key) for key in ("name", "caption", "page_title")]
    name = next((str(title) for title in titles if title), "")
    return SqlTable(
        id=fields.text("id"),
        name=name,
        header=tuple(header),
        types=types,
        rows=tuple(rows),
    )


def _types(fields: Fields, columns: int, *, needed: bool) -> tuple[str, ...]:
    """Return the types of a table's columns. Rows of the hub may leave the types out: text."""
    types: tuple[str, ...] = ()
    if needed or fields.data.get("types"):
        types = tuple(str(kind) for kind in fields.items("types"))
    types = types or ("text",) * columns
    if len(types) != columns:
        fields.fail("types", f"has {len(types)} entries for {columns} columns")
    for kind in types:
        if kind not in TYPES:
            raise one_of(f"{fields.where}: types", kind, TYPES)
    return types


def _named(sql: Fields, table: SqlTable | None) -> Query:
    """Return a query that names its columns, aggregate and operators."""
    aggregate = sql.get("agg")
    if aggregate not in AGGREGATES:
        raise one_of(f"{sql.where}: sql.agg", aggregate, AGGREGATES)
    conditions = []
    for i, raw in enumerate(sql.items("conds")):
        column, operator, value = _triple(sql, i, raw)
        if operator not in OPERATORS:
            raise one_of(f"{sql.where}: sql.conds[{i}][1]", operator, OPERATORS)
        name = sql.words(f"conds[{i}][0]", column)
        if not name:
            sql.fail(f"conds[{i}][0]", "is empty")
        constant = _constant(sql, f"conds[{i}][2]", value)
        conditions.append(Condition(name, str(operator), constant))
    query = Query(select=sql.text("sel"), aggregate=str(aggregate), conditions=tuple(conditions))
    if table is None:
        return query
    for name in (query.select, *(condition.column for condition in conditions)):
        if table.column(name) is None:
            raise one_of(f"{sql.where}: column", name, table.header)
    return query


def _indexed(sql: Fields, table: SqlTable, raw_conditions: Sequence[object]) -> Query:
    """Return a query whose columns, aggregate and operators are numbers."""
    conditions = []
    for i, raw in enumerate(raw_conditions):
        column, operator, value = _triple(sql, i, raw)
        name = _nth(sql, f"conds[{i}][0]", column, table.header)
        sign = _nth(sql, f"conds[{i}][1]", operator, OPERATORS)
        # The hub stores every value as text. The column's type marks the numbers.
        real = table.types[int(str(column))] == "real"
        constant: Value | None = read_number(as_str(value)) if real else None
        if constant is None:
            constant = _constant(sql, f"conds[{i}][2]", value)
        conditions.append(Condition(name, sign, constant))
    return Query(
        select=_nth(sql, "sel", sql.get("sel"), table.header),
        aggregate=_nth(sql, "agg", sql.get("agg"), AGGREGATES),
        conditions=tuple(conditions),
    )


def _hub_conditions(sql: Fields) -> Sequence[object]:
    """Return the conditions of a hub row, whose parts may be in three lists."""
    raw = sql.get("conds")
    if not isinstance(raw, Mapping):
        return sql.items("conds")
    conds = sql.child("conds")
    columns = conds.items("column_index")
    operators = conds.items("operator_index")
    values = conds.items("condition")
    if not len(columns) == len(operators) == len(values):
        conds.fail(
            "condition",
            f"has {len(values)} entries, column_index {len(columns)}: they must be as many",
        )
    return list(zip(columns, operators, values, strict=True))


def _triple(sql: Fields, i: int, raw: object) -> tuple[object, object, object]:
    if isinstance(raw, list | tuple) and len(raw) == 3:
        column, operator, value = raw
        return column, operator, value
    return sql.fail(f"conds[{i}]", f"is {short(raw)}; it must be [column, operator, value]")


def _nth(fields: Fields, key: str, value: object, names: Sequence[str]) -> str:
    """Return the name at a position."""
    position = as_int(value)
    if position is None or not 0 <= position < len(names):
        most = len(names) - 1
        fields.fail(key, f"is {short(value)}; it must be a whole number from 0 to {most}")
    return names[position]


def _constant(fields: Fields, key: str, value: object) -> Value:
    """Check a condition's value: text, or a number in SQLite's range."""
    if isinstance(value, str):
        return fields.words(key, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        fields.fail(key, f"is {short(value)}; it must be text or a number")
    is_small = abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)
    if not is_small:
        fields.fail(key, f"is {short(value)}; the number is too large")
    return value


def _cells(fields: Fields, i: int, row: object, width: int) -> tuple[Cell, ...]:
    if isinstance(row, list | tuple) and len(row) == width:
        return tuple(_checked_cell(fields, i, cell) for cell in row)
    return fields.fail(f"rows[{i}]", f"is {short(row)}; it must be a list of {width} cells")


def _checked_cell(fields: Fields, i: int, cell: object) -> Cell:
    if isinstance(cell, str):
        fields.words(f"rows[{i}]", cell)
        return cell
    if cell is None:
        return cell
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return cell
    return fields.fail(
        f"rows[{i}]", f"has the cell {short(cell)}; a cell is text, a number or null"
    )
