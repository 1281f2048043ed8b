from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workbench.finetune.data.wikisql.query import (
    AGGREGATES,
    OPERATORS,
    Condition,
    Query,
    format_query,
    parse,
)

# Pieces that the grammar gives a meaning to, glued in every way, find more than random letters do.
PIECES = [
    "a",
    "Zoë",
    " ",
    "  ",
    "\n",
    "'",
    "''",
    '"',
    " AND ",
    "and",
    "AND",
    " = ",
    "=",
    "<",
    ">",
    "FROM",
    " FROM table",
    "WHERE",
    "table",
    "SELECT",
    "MAX",
    "COUNT ",
    "5",
    "-1.5",
    "1e9",
    ",",
    "(",
    "%",
    "漢",
]
TEXT = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.text(st.characters(exclude_categories=["Cs"])),
)
NUMBER = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
CONDITION = st.builds(Condition, TEXT, st.sampled_from(OPERATORS), st.one_of(TEXT, NUMBER))
QUERY = st.builds(
    Query,
    select=TEXT,
    aggregate=st.sampled_from(AGGREGATES),
    conditions=st.lists(CONDITION, max_size=4).map(tuple),
)


@settings(deadline=None)
@given(QUERY)
@example(Query(select="MAX speed"))
@example(Query(select="COUNT", aggregate="COUNT"))
@example(
    Query(
        select='"Muddy" voice',
        conditions=(Condition("Year", "=", "2003"), Condition("Year", "=", 2003)),
    )
)
@example(
    Query(
        select="a",
        conditions=(Condition("b", "=", "x' AND c = 'y"), Condition("c", ">", "'Til Tuesday")),
    )
)
@example(
    Query(select="a", conditions=(Condition("b", "=", ""), Condition("b", "=", "5' AND b = 5")))
)
def test_every_query_is_read_back_as_it_was(query: Query) -> None:
    text = format_query(query)
    again = parse(text)
    assert again == query
    assert again is not None
    kinds = [type(condition.value) for condition in again.conditions]
    assert kinds == [type(condition.value) for condition in query.conditions]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (Query(select="Nationality"), "SELECT Nationality FROM table"),
        (
            Query(
                select="School/Club Team",
                aggregate="COUNT",
                conditions=(Condition("Player", "=", "Terrence Ross"),),
            ),
            "SELECT COUNT School/Club Team FROM table WHERE Player = Terrence Ross",
        ),
        (
            Query(
                select="No.",
                conditions=(Condition("Year", ">", 1990), Condition("Score", "<", 2.5)),
            ),
            "SELECT No. FROM table WHERE Year > 1990 AND Score < 2.5",
        ),
        (
            Query(
                select="Act",
                conditions=(Condition("Year", "=", "1990"), Condition("Song", "=", '"Hell", no')),
            ),
            "SELECT Act FROM table WHERE Year = '1990' AND Song = \"Hell\", no",
        ),
        (
            Query(
                select="Act",
                conditions=(
                    Condition("Duo", "=", "Ike AND Tina"),
                    Condition("Pub", "=", "O'Neill"),
                ),
            ),
            "SELECT Act FROM table WHERE Duo = 'Ike AND Tina' AND Pub = O'Neill",
        ),
        (Query(select="Max speed"), "SELECT Max speed FROM table"),
        (Query(select="MAX speed"), 'SELECT "MAX speed" FROM table'),
    ],
)
def test_text_is_bare_where_it_can_be(query: Query, text: str) -> None:
    assert format_query(query) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT",
        "SELECT FROM table",
        "SELECT a FROM there",
        "SELECT a FROM table WHERE",
        "SELECT a FROM table WHERE b",
        "SELECT a FROM table WHERE b =",
        "SELECT a FROM table WHERE b = c AND",
        "SELECT a FROM table WHERE b = c AND d",
        "hello",
        "SELECT " + "a" * 30_000 + " FROM table",
    ],
)
def test_what_is_no_query_is_none(text: str) -> None:
    assert parse(text) is None


def test_a_model_may_write_a_blank_too_many() -> None:
    assert parse(" SELECT  MAX  a  FROM  table  WHERE  b  =  c d  AND  e  <  5 ") == Query(
        select="a", aggregate="MAX", conditions=(Condition("b", "=", "c d"), Condition("e", "<", 5))
    )


@pytest.mark.parametrize(
    "text",
    [
        "SELECT a" + " " * 19_000,
        "SELECT a FROM table WHERE " + "b = c  " * 2500,
        "SELECT " + "a FROM table WHERE " * 900,
        "SELECT a FROM table WHERE b = " + "' AND " * 3000,
        'SELECT "' + '""' * 9000,
    ],
)
def test_a_strange_answer_is_read_in_time(text: str) -> None:
    parse(text)


def test_a_model_may_answer_in_lower_case() -> None:
    query = parse("select count player from table where school = butler and year > 5")
    assert query == Query(
        select="player",
        aggregate="COUNT",
        conditions=(Condition("school", "=", "butler"), Condition("year", ">", 5)),
    )


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (
            "SELECT a FROM table WHERE b = C AND d > 5",
            "SELECT A FROM table WHERE D > 5.0 AND B = c",
            True,
        ),
        ("SELECT a FROM table WHERE b = '5'", "SELECT a FROM table WHERE b = 5", True),
        ("SELECT a FROM table WHERE b = ½ cup", "SELECT a FROM table WHERE b = 1⁄2  CUP", True),
        ("SELECT a FROM table WHERE b = c AND b = c", "SELECT a FROM table WHERE b = c", True),
        ("SELECT a FROM table WHERE b = c", "SELECT a FROM table WHERE b > c", False),
        ("SELECT MAX a FROM table", "SELECT MIN a FROM table", False),
        ("SELECT a FROM table", "SELECT b FROM table", False),
        ("SELECT a FROM table WHERE b = c", "SELECT a FROM table", False),
        ("SELECT a FROM table WHERE b = c", "SELECT a FROM table WHERE b = d", False),
        ("nothing", "nothing", False),
    ],
)
def test_logical_form(a: str, b: str, same: bool) -> None:
    left, right = parse(a), parse(b)
    assert (
        left is not None and right is not None and left.logical_form() == right.logical_form()
    ) is same


@settings(deadline=None)
@given(QUERY)
def test_the_order_of_conditions_does_not_matter(query: Query) -> None:
    turned = Query(
        select=query.select, aggregate=query.aggregate, conditions=query.conditions[::-1]
    )
    assert query.logical_form() == turned.logical_form()


def test_a_number_too_large_to_be_one_stays_text() -> None:
    query = parse("SELECT a FROM table WHERE b = 1e999")
    assert query is not None
    assert query.conditions[0].value == "1e999"
    assert not any(isinstance(c.value, float) and math.isinf(c.value) for c in query.conditions)
