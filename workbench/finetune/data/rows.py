"""Convert rows of known forms to the trainer's form. Errors name place and field.

WikiSQL has three forms with different `sql`. The JSONL of corrected editions names columns. The
original release has column numbers and a tables file. Rows of the hub contain their table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from workbench.base.errors import ConfigError, one_of
from workbench.base.json_values import Json, text
from workbench.finetune.data.lines import Fields, short
from workbench.finetune.data.messages import (
    CHAT,
    CHAT_KEYS,
    TOOLS,
    Message,
    answered,
    chat_key,
    completed_turns,
    last_of,
    tools_of,
    turns_of,
)
from workbench.finetune.data.sql.query import AGGREGATES, OPERATORS, Condition, Query, format_query
from workbench.finetune.data.sql.tables import TYPES, Cell, SqlTable, read_number

PREFIX = "translate to SQL: "
SUMMARIZE = "Summarize this dialogue:"


class _Form(NamedTuple):
    """Two keys of a row form, and optional keys."""

    asks: str
    answers: str
    given: str = ""
    """Optional key for the context of the question."""
    heading: str = ""
    """Instruction for rows that contain only the input."""


_FORMS = (
    _Form("source", "target", given="input"),
    _Form("instruction", "output", given="input"),
    _Form("instruction", "response", given="context"),
    _Form("dialogue", "summary", heading=SUMMARIZE),
    _Form("dialog", "summary", heading=SUMMARIZE),
    _Form("document", "summary", heading="Summarize this document:"),
    _Form("article", "highlights", heading="Summarize this article:"),
    _Form("prompt", "completion"),
    _Form("question", "answer", given="context"),
    _Form("query", "response"),
)
_SQL = _Form("question", "sql")
ANSWERS = {
    form.asks: [other.answers for other in (*_FORMS, _SQL) if other.asks == form.asks]
    for form in _FORMS
}
"""Question key of a form, with the keys that may contain the answer."""
NESTED = ("sql", "table", *CHAT_KEYS)
"""Keys with objects or lists as values; a CSV table contains their JSON text."""
_ALONE = "text"
_FIELDS = dict.fromkeys(key for form in (*_FORMS, _SQL) for key in form[:3] if key) | dict.fromkeys(
    (_ALONE, CHAT, TOOLS, "table_id", "table")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    source: str
    """Input of the model, or the instruction; empty for plain text to learn from."""
    target: str
    table_id: str | None = None
    """Id of the table for the question; None for a row without a table."""
    input: str = ""
    """Input of the instruction, if the row has a separate field."""
    messages: tuple[Message, ...] = ()
    """Turns of a chat up to the last answer.

    `source` and `target` are the last question and answer.
    """
    tools: tuple[Json, ...] = ()
    """Schemas of functions that a chat's assistant may call."""

    opening: str = ""
    """Beginning of the answer, if the model only continues a text."""

    @property
    def asks(self) -> bool:
        """Whether the row has a question, as opposed to plain text."""
        return bool(self.source or self.input or self.messages)

    def to_json(self) -> str:
        apart = {"input": self.input} if self.input else {}
        turns = {key: value for key, value in ((CHAT, self.messages), (TOOLS, self.tools)) if value}
        row = {
            "source": self.source,
            **apart,
            "target": self.target,
            "table_id": self.table_id,
            **turns,
        }
        return json.dumps(row, ensure_ascii=False)


Refusal = Callable[[Example], str]
"""Function that returns the reason why a model cannot learn from a row; empty if possible."""


def any_row(_: Example) -> str:
    """Accept every row."""
    return ""


def row_from(data: object, where: str, tables: Mapping[str, SqlTable] | None = None) -> Example:
    """Convert a row of any known form to the trainer's form."""
    row = Fields(data, where)
    if turns := turns_of(row) or completed_turns(row):
        return _chat(row, turns)
    if "sql" not in row.data:
        return _written(row)
    question = row.text("question")
    sql = row.child("sql")
    if "table" in row.data:
        table = table_from(row.data["table"], f"{where}: table", named_types=False)
        query = _indexed(sql, table, _hub_conditions(sql))
        return Example(source=PREFIX + question, target=format_query(query), table_id=table.id)
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
    return Example(source=PREFIX + question, target=format_query(query), table_id=table_id)


def columns_read(data: Mapping[str, object]) -> Sequence[str]:
    """Return the columns that a row's form reads; empty for a row of unknown form.

    Example:
        >>> columns_read({"instruction": "Sort.", "output": "1 2", "text": "Below is …"})
        ('instruction', 'output', 'input')
    """
    if _chat_of(data):
        # A prepared chat row repeats the last question and answer.
        prepared = ("source", "target") if {"source", "target", "table_id"} <= data.keys() else ()
        return (*CHAT_KEYS, TOOLS, "table_id", *prepared)
    if "sql" in data:
        return ("question", "sql", "table" if "table" in data else "table_id")
    if (form := _form_in(data)) is not None:
        beside = "table_id" if form.asks == "source" else ""
        if form.asks == "prompt" and isinstance(data["prompt"], list | tuple):
            beside = TOOLS
        return tuple(filter(None, (form.asks, form.answers, form.given, beside)))
    return (_ALONE,) if _ALONE in data else ()


def has_answer(columns: Iterable[str]) -> bool:
    """Return whether the columns include an answer: a chat, or a question with an answer."""
    names = set(columns)
    form = _form_of(names)
    return bool(names & {*CHAT_KEYS}) or (form is not None and form is not _SQL)


def renamed(data: object, columns: Mapping[str, str], where: str) -> Mapping[str, object]:
    """Return a row's fields, read from the columns in `columns`."""
    row = Fields(data, where)
    for field, column in columns.items():
        if column not in row.data:
            outer = column.partition(".")[0]
            if isinstance(row.data.get(outer), Mapping | list | tuple):
                raise ConfigError(
                    f"{where}: the column for {field!r} is {column!r}, and {outer!r} is one column that holds others; "
                    f"columns within a column are not read. Write {column!r} as a column of its own"
                )
            if "{" in column:
                raise ConfigError(
                    f"{where}: the column for {field!r} is {column!r}; columns takes names and no templates. Write the "
                    "text as a column of its own, or give the job's prompt as a template"
                )
            raise one_of(f"{where}: the column for {field!r},", column, row.data)
    return {field: row.data[column] for field, column in columns.items()}


def check_columns(columns: Mapping[str, str]) -> Mapping[str, str]:
    """Return the columns of fields; raise ConfigError for unknown or incomplete fields."""
    for field in columns:
        if field not in _FIELDS:
            raise one_of("dataset columns: the field", field, _FIELDS)
    if columns and _form_of(columns) is None and not {_ALONE, CHAT} & columns.keys():
        raise ConfigError(
            f"dataset columns name {_listed(columns)}, which make no row; {_nearest(columns)}"
        )
    return columns


def table_from(data: object, where: str, *, named_types: bool = True) -> SqlTable:
    """Read a table in the form of the release or of the hub."""
    fields = Fields(data, where)
    header = tuple(
        fields.words(f"header[{i}]", name) for i, name in enumerate(fields.items("header"))
    )
    if not header:
        fields.fail("header", "is empty; a table has a column at least")
    types = (
        tuple(str(kind) for kind in fields.items("types"))
        if named_types or fields.data.get("types")
        else ()
    )
    types = types or ("text",) * len(header)
    if len(types) != len(header):
        fields.fail("types", f"has {len(types)} entries for {len(header)} columns")
    for kind in types:
        if kind not in TYPES:
            raise one_of(f"{where}: types", kind, TYPES)
    rows = tuple(_cells(fields, i, row, len(header)) for i, row in enumerate(fields.items("rows")))
    name = next(
        (str(fields.data[k]) for k in ("name", "caption", "page_title") if fields.data.get(k)), ""
    )
    return SqlTable(id=fields.text("id"), name=name, header=header, types=types, rows=rows)


def _chat(row: Fields, turns: Sequence[Message]) -> Example:
    learned = answered(turns)
    if not learned:
        row.fail(chat_key(row) or "completion", "has no turn of the assistant to learn from")
    table_id = row.text("table_id") if row.data.get("table_id") is not None else None
    source = last_of(learned, "user")
    target = last_of(learned, "assistant")
    return Example(
        source=source, target=target, table_id=table_id, messages=learned, tools=tools_of(row)
    )


def _written(row: Fields) -> Example:
    if (form := _form_in(row.data)) is not None:
        return _of_form(row, form)
    if _ALONE in row.data:
        return Example(source="", target=row.prose(_ALONE))
    present = _listed(row.data) or "nothing"
    raise ConfigError(
        f"{row.where}: no known form of a row has the columns {present}; {_nearest(row.data)}"
    )


def _of_form(row: Fields, form: _Form) -> Example:
    if form.heading:
        asked = row.prose(form.asks, needed=False)
        return Example(source=form.heading, input=asked, target=row.prose(form.answers))
    prepared = form.asks == "source"
    table_id = row.text("table_id") if prepared and row.data.get("table_id") is not None else None
    given = row.prose(form.given, needed=False) if form.given else ""
    for key in (form.asks, form.answers):
        if form.asks == "prompt" and isinstance(row.data[key], list | tuple):
            row.fail(
                key,
                "is a list; let both 'prompt' and 'completion' be lists of messages, or both be text",
            )
    source = row.prose(form.asks, needed=not prepared)
    # Some published datasets have empty answers. Plain text to learn from must not be empty.
    target = row.prose(form.answers, needed=not (source or given))
    return Example(source=source, target=target, table_id=table_id, input=given)


def _chat_of(data: Mapping[str, object]) -> bool:
    return any(data.get(key) is not None for key in CHAT_KEYS)


def _form_in(data: Mapping[str, object]) -> _Form | None:
    """Return the two-key form of a row; None for plain text or an unknown form."""
    # A table's row has every column of the table. Ignore empty columns unless no other form fits.
    filled = {key for key, value in data.items() if value is not None}
    form = _form_of(filled)
    return _form_of(data) if form is None and _ALONE not in filled else form


def _form_of(keys: Iterable[str]) -> _Form | None:
    present = set(keys)
    return next((form for form in (*_FORMS, _SQL) if {form.asks, form.answers} <= present), None)


def _nearest(keys: Iterable[str]) -> str:
    """Return a hint with the most similar form and its missing keys."""
    names = [str(key) for key in keys]

    def likeness(form: _Form) -> tuple[int, float]:
        missing = [key for key in form[:2] if key not in names]
        others = [name.lower() for name in names if name not in form]
        near = (SequenceMatcher(None, key, other).ratio() for key in missing for other in others)
        return -len(missing), max(near, default=0)

    form = max((*_FORMS, _SQL), key=likeness)
    missing = " and ".join(repr(key) for key in form[:2] if key not in names)
    return (
        f"the nearest is {form.asks!r} and {form.answers!r}, and {missing} "
        f"{'are' if ' and ' in missing else 'is'} missing: rename the columns, or name those that hold them, as in "
        "columns={'source': …, 'target': …}"
    )


def _listed(names: Iterable[object]) -> str:
    return ", ".join(repr(str(name)) for name in names)


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
        # The hub stores every value as text. The column's type marks the numbers.
        real = table.types[int(str(column))] == "real"
        number = read_number(text(value)) if real else None
        kept = sql.constant(f"conds[{i}][2]", value) if number is None else number
        conditions.append(Condition(name, sql.index(f"conds[{i}][1]", operator, OPERATORS), kept))
    select = sql.index("sel", sql.get("sel"), table.header)
    return Query(
        select=select,
        aggregate=sql.index("agg", sql.get("agg"), AGGREGATES),
        conditions=tuple(conditions),
    )


def _hub_conditions(sql: Fields) -> Sequence[object]:
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
    return fields.fail(
        f"rows[{i}]", f"has the cell {short(cell)}; a cell is text, a number or null"
    )
