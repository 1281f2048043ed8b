"""Rows in the forms they come in, made into the one form that the trainer reads. Pure; errors name place and field.

Three forms of WikiSQL differ in what `sql` holds: columns by name (the JSONL of corrected editions), columns by index
with a tables file (the original release), and the hub's rows, which carry their table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import text
from workbench.jobs.data.lines import Fields, short
from workbench.jobs.data.sql import AGGREGATES, OPERATORS, Condition, Query, format_query
from workbench.jobs.data.tables import TYPES, Cell, SqlTable, read_number

__all__ = ["PREFIX", "SUMMARIZE", "Row", "row_from", "table_from"]

PREFIX = "translate to SQL: "
SUMMARIZE = "Summarize this dialogue:"

_FORMS = "A row is source and target, instruction and output, dialogue and summary, text alone, or question and sql"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a prepared dataset."""

    source: str
    """What the model reads, or its instruction; empty where the target is plain text to learn from."""
    target: str
    table_id: str | None = None
    """The table that the question is asked of; None for a row without a table."""
    input: str = ""
    """What the instruction is about, where the row keeps that apart."""

    @property
    def is_plain(self) -> bool:
        """Whether it is text to go on with, and nothing is asked."""
        return not (self.source or self.input)

    def to_json(self) -> str:
        """Return the line of `train.jsonl` or `eval.jsonl`."""
        apart = {"input": self.input} if self.input else {}
        row = {"source": self.source, **apart, "target": self.target, "table_id": self.table_id}
        return json.dumps(row, ensure_ascii=False)


def row_from(data: object, where: str, tables: Mapping[str, SqlTable] | None = None) -> Row:
    """Make the trainer's row of a row in any known form."""
    row = Fields(data, where)
    if "sql" not in row.data and (written := _written(row)) is not None:
        return written
    if "question" not in row.data:
        present = ", ".join(map(str, row.data)) or "nothing"
        raise ConfigError(f"{where}: the key 'question' is missing; there is: {present}. {_FORMS}")
    question, sql = row.text("question"), row.child("sql")
    if "table" in row.data:
        table = table_from(row.data["table"], f"{where}: table", named_types=False)
        query = _indexed(sql, table, _hub_conditions(sql))
        return Row(source=PREFIX + question, target=format_query(query), table_id=table.id)
    table_id = row.text("table_id")
    table_or_none = None if tables is None else tables.get(table_id)
    if tables is not None and table_or_none is None:
        raise ConfigError(f"{where}: table_id {table_id!r} is not in the tables file")
    if text(sql.get("sel")):
        query = _named(sql, table_or_none)
    elif table_or_none is None:
        sql.fail("sel", "names its column by number: give the tables file too (`tables`)")
    else:
        query = _indexed(sql, table_or_none, sql.items("conds"))
    return Row(source=PREFIX + question, target=format_query(query), table_id=table_id)


def table_from(data: object, where: str, *, named_types: bool = True) -> SqlTable:
    """Read a table in the release's or the hub's form."""
    fields = Fields(data, where)
    header = tuple(fields.words(f"header[{i}]", name) for i, name in enumerate(fields.items("header")))
    if not header:
        fields.fail("header", "is empty; a table has a column at least")
    types = tuple(str(kind) for kind in fields.items("types")) if named_types or fields.data.get("types") else ()
    types = types or ("text",) * len(header)
    if len(types) != len(header):
        fields.fail("types", f"has {len(types)} entries for {len(header)} columns")
    for kind in types:
        if kind not in TYPES:
            raise one_of(f"{where}: types", kind, TYPES)
    rows = tuple(_cells(fields, i, row, len(header)) for i, row in enumerate(fields.items("rows")))
    name = next((str(fields.data[k]) for k in ("name", "caption", "page_title") if fields.data.get(k)), "")
    return SqlTable(id=fields.text("id"), name=name, header=header, types=types, rows=rows)


def _written(row: Fields) -> Row | None:
    if "source" in row.data and "target" in row.data:
        table_id = row.text("table_id") if row.data.get("table_id") is not None else None
        source, given = row.prose("source", needed=False), row.prose("input", needed=False)
        # An answer may be empty, as some are in published sets; a text to learn from may not.
        target = row.prose("target", needed=not (source or given))
        return Row(source=source, target=target, table_id=table_id, input=given)
    if "instruction" in row.data:
        given, answer = ("context", "response") if "response" in row.data else ("input", "output")
        row.get(answer)
        return Row(
            source=row.prose("instruction"),
            input=row.prose(given, needed=False),
            target=row.prose(answer, needed=False),
        )
    if "summary" in row.data:
        spoken = "dialog" if "dialog" in row.data else "dialogue"
        row.get(spoken)
        return Row(source=SUMMARIZE, input=row.prose(spoken, needed=False), target=row.prose("summary"))
    return Row(source="", target=row.prose("text")) if "text" in row.data else None


def _named(sql: Fields, table: SqlTable | None) -> Query:
    aggregate = sql.get("agg")
    if aggregate not in AGGREGATES:
        raise one_of(f"{sql.where}: sql.agg", aggregate, AGGREGATES)
    conditions = []
    for i, raw in enumerate(sql.items("conds")):
        column, operator, value = _triple(sql, i, raw)
        if operator not in OPERATORS:
            raise one_of(f"{sql.where}: sql.conds[{i}][1]", operator, OPERATORS)
        name = sql.words(f"conds[{i}][0]", column) or sql.fail(f"conds[{i}][0]", "is empty")
        conditions.append(Condition(name, str(operator), sql.constant(f"conds[{i}][2]", value)))
    query = Query(select=sql.text("sel"), aggregate=str(aggregate), conditions=tuple(conditions))
    for name in (query.select, *(c.column for c in conditions)):
        if table is not None and table.column(name) is None:
            raise one_of(f"{sql.where}: column", name, table.header)
    return query


def _indexed(sql: Fields, table: SqlTable, raw_conditions: Sequence[object]) -> Query:
    conditions = []
    for i, raw in enumerate(raw_conditions):
        column, operator, value = _triple(sql, i, raw)
        name = sql.index(f"conds[{i}][0]", column, table.header)
        # The hub stores every value as text: the column's type says which were numbers.
        real = table.types[int(str(column))] == "real"
        number = read_number(text(value)) if real else None
        kept = sql.constant(f"conds[{i}][2]", value) if number is None else number
        conditions.append(Condition(name, sql.index(f"conds[{i}][1]", operator, OPERATORS), kept))
    select = sql.index("sel", sql.get("sel"), table.header)
    return Query(select=select, aggregate=sql.index("agg", sql.get("agg"), AGGREGATES), conditions=tuple(conditions))


def _hub_conditions(sql: Fields) -> Sequence[object]:
    raw = sql.get("conds")
    if not isinstance(raw, Mapping):
        return sql.items("conds")
    conds = sql.child("conds")
    columns, operators = conds.items("column_index"), conds.items("operator_index")
    values = conds.items("condition")
    if not len(columns) == len(operators) == len(values):
        conds.fail("condition", f"has {len(values)} entries, column_index {len(columns)}: they must be as many")
    return list(zip(columns, operators, values, strict=True))


def _triple(sql: Fields, i: int, raw: object) -> tuple[object, object, object]:
    match raw:
        case [column, operator, value]:
            return column, operator, value
    return sql.fail(f"conds[{i}]", f"is {short(raw)}; it must be [column, operator, value]")


def _cells(fields: Fields, i: int, row: object, width: int) -> tuple[Cell, ...]:
    match row:
        case [*cells] if len(cells) == width:
            return tuple(_checked_cell(fields, i, cell) for cell in cells)
    return fields.fail(f"rows[{i}]", f"is {short(row)}; it must be a list of {width} cells")


def _checked_cell(fields: Fields, i: int, cell: object) -> Cell:
    match cell:
        case bool():
            pass
        case str():
            fields.words(f"rows[{i}]", cell)
            return cell
        case int() | float() | None:
            return cell
    return fields.fail(f"rows[{i}]", f"has the cell {short(cell)}; a cell is text, a number or null")
