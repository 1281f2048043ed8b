"""`wikisql-mini`: generated questions with SQL over the tables of `mini_tables.py`.

The bytes are always the same. Questions contain columns and values as written in the table, so a
T5 trained from scratch can learn to copy them. Train and eval share no question.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example
from workbench.finetune.data.wikisql.mini_tables import MINI_TABLES
from workbench.finetune.data.wikisql.query import Condition, Query, format_query
from workbench.finetune.data.wikisql.tables import Cell, SqlTable
from workbench.finetune.data.wikisql.task import WikiSql

MAX_ROWS = 100_000
"""Largest number of questions, train and eval together. Some more exist."""


def mini_tables() -> tuple[SqlTable, ...]:
    """Return the tables with their rows, in a fixed order."""
    blocks = MINI_TABLES.strip().split("\n\n")
    return tuple(_table(f"mini-{number}", block) for number, block in enumerate(blocks, start=1))


def mini_rows(seed: int, count: int) -> Iterator[Example]:
    """Yield distinct questions. The first `n` questions do not depend on `count`.

    Args:
        seed: Seed of the questions.
        count: Number of questions, up to `MAX_ROWS`.

    Raises:
        ConfigError: `count` is larger than `MAX_ROWS`.
    """
    if count > MAX_ROWS:
        raise ConfigError(
            f"wikisql-mini has {MAX_ROWS} questions, train "
            f"and eval together; {count} were asked for"
        )
    # A string seed, `random()` and `_pick` have the same result in every version of Python.
    rng = random.Random(f"wikisql-mini {seed}")
    tables = mini_tables()
    seen: set[str] = set()
    while len(seen) < count:
        table = _pick(rng, tables)
        query = _query(rng, table)
        question = _question(rng, table, query)
        if question not in seen:
            seen.add(question)
            yield Example(
                source=WikiSql.prefix + question, target=format_query(query), table_id=table.id
            )


_T = TypeVar("_T")
_AGGREGATES = ("",) * 10 + ("COUNT",) * 2 + ("MAX", "MIN", "SUM", "AVG") * 2
_CONDITION_COUNTS = (1,) * 9 + (2,) * 6 + (3,) * 3 + (0,)
_OPENINGS = {
    "": (
        "What is the {0} of {1}?",
        "Which {0} is listed for {1}?",
        "Tell me the {0} of {1}.",
        "Name the {0} for {1}.",
    ),
    "COUNT": (
        "How many {0} entries are there for {1}?",
        "Count the {0} of {1}.",
        "What is the number of {0} for {1}?",
    ),
    "MAX": (
        "What is the highest {0} of {1}?",
        "Tell me the maximum {0} for {1}.",
        "Give the largest {0} of {1}.",
    ),
    "MIN": (
        "What is the lowest {0} of {1}?",
        "Tell me the minimum {0} for {1}.",
        "Give the smallest {0} of {1}.",
    ),
    "SUM": (
        "What is the total {0} of {1}?",
        "Give the sum of {0} for {1}.",
        "Add up the {0} of {1}.",
    ),
    "AVG": (
        "What is the average {0} of {1}?",
        "Give the mean {0} for {1}.",
        "On average, what is the {0} of {1}?",
    ),
}
_VERBS = {
    "=": ("{0} is {1}", "{0} equals {1}"),
    ">": ("{0} is more than {1}", "{0} is above {1}"),
    "<": ("{0} is less than {1}", "{0} is below {1}"),
}
_NOUNS = {
    "=": ("{0} {1}", "{0} of {1}"),
    ">": ("{0} over {1}", "{0} above {1}"),
    "<": ("{0} under {1}", "{0} below {1}"),
}
_STYLES = (("whose", _VERBS), ("where", _VERBS), ("with", _NOUNS))


def _query(rng: random.Random, table: SqlTable) -> Query:
    aggregate = _pick(rng, _AGGREGATES)
    numeric = aggregate not in ("", "COUNT")
    positions = [i for i, kind in enumerate(table.types) if kind == "real" or not numeric]
    select = _pick(rng, positions)
    count = _pick(rng, _CONDITION_COUNTS)
    others = [i for i in range(len(table.header)) if i != select]
    row = _pick(rng, table.rows)
    conditions = []
    for _ in range(count):
        position = others.pop(int(rng.random() * len(others)))
        conditions.append(_condition(rng, table, position, row[position]))
    return Query(select=table.header[select], aggregate=aggregate, conditions=tuple(conditions))


def _condition(rng: random.Random, table: SqlTable, position: int, cell: Cell) -> Condition:
    column = table.header[position]
    if isinstance(cell, str) or cell is None:
        return Condition(column, "=", str(cell))
    values = [row[position] for row in table.rows]
    numbers = [value for value in values if isinstance(value, int | float)]
    operator = _pick(rng, ("=", ">", "<"))
    if operator == "=":
        return Condition(column, "=", cell)
    # The cell itself fits the condition.
    if operator == ">":
        fitting = [number for number in numbers if number < cell]
    else:
        fitting = [number for number in numbers if number > cell]
    if not fitting:
        return Condition(column, "=", cell)
    return Condition(column, operator, _pick(rng, fitting))


def _question(rng: random.Random, table: SqlTable, query: Query) -> str:
    subject = table.name
    if not query.conditions:
        subject = f"all {subject}"
    else:
        lead, phrases = _pick(rng, _STYLES)
        parts = []
        for condition in query.conditions:
            phrase = _pick(rng, phrases[condition.operator])
            parts.append(phrase.format(condition.column, condition.value))
        subject += f" {lead} " + " and ".join(parts)
    return _pick(rng, _OPENINGS[query.aggregate]).format(query.select, subject)


def _pick(rng: random.Random, options: Sequence[_T]) -> _T:
    return options[int(rng.random() * len(options))]


def _table(table_id: str, block: str) -> SqlTable:
    head, body = block.split("\n", 1)
    name, columns = head.split(" | ")
    marked = columns.split(", ")
    types = tuple("real" if column.endswith("#") else "text" for column in marked)
    rows = []
    for line in body.split(";"):
        cells = [cell.strip() for cell in line.split(",")]
        rows.append(tuple(int(c) if t == "real" else c for c, t in zip(cells, types, strict=True)))
    return SqlTable(
        id=table_id,
        name=name,
        header=tuple(c.removesuffix("#") for c in marked),
        types=types,
        rows=tuple(rows),
    )
