from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.base.errors import ConfigError
from workbench.finetune.data.wikisql.query import Condition, Query
from workbench.finetune.data.wikisql.rows import table_from
from workbench.finetune.data.wikisql.tables import SqlTable, execute

TABLE = SqlTable(
    id="1-1",
    name="towns",
    header=("Town", "Country", "Population", "Founded"),
    types=("text", "text", "real", "text"),
    rows=(
        ("Łódź", "Poland", "672,185", 1423),
        ("Zürich", "Switzerland", 402762, "c. 1000"),
        ("GRAZ", "Austria", 291072.0, None),
        ("Robert'); DROP TABLE t;--", "O'Land", 7, "2003"),
    ),
)


def ask(
    select: str, *conditions: tuple[str, str, object], aggregate: str = "", table: SqlTable = TABLE
) -> list[object]:
    wanted = tuple(Condition(*c) for c in conditions)  # type: ignore[arg-type]
    return list(execute(Query(select=select, aggregate=aggregate, conditions=wanted), table))


@pytest.mark.parametrize(
    ("select", "conditions", "aggregate", "answer"),
    [
        ("town", [("COUNTRY", "=", "austria")], "", ["GRAZ"]),
        ("Town", [("Town", "=", "łÓDź")], "", ["Łódź"]),
        ("Town", [("Population", ">", 300000)], "", ["Łódź", "Zürich"]),
        ("Town", [("Population", ">", "300,000")], "", ["Łódź", "Zürich"]),
        ("Town", [("Population", ">", "over 300000 souls")], "", ["Łódź", "Zürich"]),
        ("Town", [("Population", ">", 100), ("Population", "<", 300000)], "", ["GRAZ"]),
        ("Population", [], "MAX", [672185]),
        ("Population", [], "MIN", [7]),
        ("Population", [("Country", "=", "nowhere")], "SUM", [None]),
        ("Population", [("Population", "<", 300000)], "AVG", [(291072 + 7) / 2]),
        ("Town", [("Country", "=", "poland")], "COUNT", [1]),
        ("Founded", [("Town", "=", "graz")], "", [None]),
        ("Town", [("Founded", "=", 2003)], "", ["Robert'); DROP TABLE t;--"]),
        ("Country", [("Town", "=", "Robert'); DROP TABLE t;--")], "", ["O'Land"]),
        ("Town", [("Town", "=", "' OR 1 = 1 --")], "", []),
    ],
)
def test_answers(
    select: str, conditions: list[tuple[str, str, object]], aggregate: str, answer: list[object]
) -> None:
    assert ask(select, *conditions, aggregate=aggregate) == answer


def test_whole_numbers_stay_whole() -> None:
    assert repr(ask("Population", ("Town", "=", "zürich"))) == "[402762]"


@pytest.mark.parametrize(
    ("select", "condition", "message"),
    [
        (
            "Mayor",
            ("Town", "=", "x"),
            "table '1-1' has no column 'Mayor'; its columns: Town, Country",
        ),
        (
            "Town",
            ("Population", ">", "many"),
            "column 'Population' of numbers cannot be compared with 'many'",
        ),
        ("Town", ("Population", ">", 2**70), "could not be run"),
        ("Town", ("Town", "~", "x"), "operator"),
    ],
)
def test_what_cannot_be_asked(
    select: str, condition: tuple[str, str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        ask(select, condition)


def test_an_unknown_aggregate_never_reaches_sqlite() -> None:
    with pytest.raises(ConfigError, match="aggregate"):
        ask("Town", aggregate="load_extension")


def test_rows_are_capped_and_time_too() -> None:
    many = dataclasses.replace(TABLE, rows=TABLE.rows * 5000)
    query = Query(select="Town", conditions=(Condition("Town", ">", ""),))
    assert len(execute(query, many, max_rows=100)) == 100
    with pytest.raises(ConfigError, match="interrupted"):
        execute(Query(select="Town", aggregate="MAX"), many, timeout_s=0.0)


CELL = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.none()
)


@settings(deadline=None)
@given(st.lists(st.tuples(CELL, CELL), max_size=4), CELL)
def test_any_cells_and_value_can_be_asked(rows: list[tuple[object, object]], value: object) -> None:
    table = SqlTable(id="t", header=('a"; DROP', "b'"), types=("text", "text"), rows=tuple(rows))  # type: ignore[arg-type]
    ask('a"; drop', ("b'", "=", "" if value is None else value), table=table)


def test_a_table_is_read_back_from_its_line() -> None:
    assert table_from(json.loads(TABLE.to_json()), "tables.jsonl, line 1") == TABLE
