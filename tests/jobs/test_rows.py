from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.forms.table import SUMMARIZE
from workbench.finetune.data.lines import read_lines
from workbench.finetune.data.rows import (
    Example,
    check_columns,
    renamed,
    row_from,
)
from workbench.finetune.data.tasks import TASK
from workbench.finetune.data.wikisql.query import parse
from workbench.finetune.data.wikisql.rows import table_from
from workbench.finetune.data.wikisql.tables import SqlTable

NAMED = {
    "table_id": "1-10015132-11",
    "question": "What position does the player who played for  Butler CC (KS) play? ",
    "sql": {"sel": "Position", "conds": [["School/Club Team", "=", "Butler CC (KS)"]], "agg": ""},
}
TABLE = {
    "id": "1-1000181-1",
    "page_title": "States",
    "header": ["State", "Text/background\ncolour", "Current series", "Area"],
    "types": ["text", "text", "text", "real"],
    "rows": [["South Australia", "slogan", "ABC 123", 983.482]],
}
# The line after the one shown on WikiSQL's own page.
INDEXED = {
    "phase": 1,
    "table_id": "1-1000181-1",
    "question": "Tell me the notes for South Australia",
    "sql": {"sel": 1, "conds": [[0, 0, "SOUTH AUSTRALIA"], [3, 1, 900]], "agg": 3},
}
HUB = {
    "phase": 1,
    "question": "Tell me the notes for South Australia",
    "table": {
        **TABLE,
        "page_id": "x",
        "section_title": "",
        "caption": "States",
        "name": "table_1000181_1",
    },
    "sql": {
        "human_readable": "SELECT COUNT Text FROM table "
        "WHERE State = SOUTH AUSTRALIA AND Area > 900",
        "sel": 1,
        "agg": 3,
        "conds": {
            "column_index": [0, 3],
            "operator_index": [0, 1],
            "condition": ["SOUTH AUSTRALIA", "900"],
        },
    },
}
TABLES = {"1-1000181-1": table_from(TABLE, "tables.jsonl, line 1")}
TARGET = (
    "SELECT COUNT Text/background colour FROM table WHERE State = SOUTH AUSTRALIA AND Area > 900"
)


def changed(row: object, path: str, value: object) -> dict[str, object]:
    """Set, or with `...` remove, what stands at a dotted path."""
    row = copy.deepcopy(row)
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inner = row
    for key in way:
        inner = inner[key]  # type: ignore[index]
    if value is ...:
        del inner[last]  # type: ignore[attr-defined]
    else:
        inner[last] = value  # type: ignore[index]
    return row  # type: ignore[return-value]


def test_columns_by_name() -> None:
    assert row_from(NAMED, "here") == Example(
        source=TASK.prefix + "What position does the player who played for Butler CC (KS) play?",
        target="SELECT Position FROM table WHERE School/Club Team = Butler CC (KS)",
        table_id="1-10015132-11",
    )


def test_columns_by_number_need_the_tables() -> None:
    assert row_from(INDEXED, "here", TABLES).target == TARGET
    with pytest.raises(
        ConfigError,
        match=sentence(
            "names its column by number: give the tables file too (`tables`)", "here: sql.sel"
        ),
    ):
        row_from(INDEXED, "here")


def test_the_hubs_rows_carry_their_table_and_their_numbers_become_numbers_again() -> None:
    row = row_from(HUB, "here")
    assert row.target == TARGET
    assert row.table_id == "1-1000181-1"
    assert row_from(changed(HUB, "table.types", []), "here").target == TARGET.replace(
        "900", "'900'"
    )


def test_a_row_that_is_prepared_already_passes() -> None:
    row = row_from(INDEXED, "here", TABLES)
    assert row_from(json.loads(row.to_json()), "here") == row


WRITTEN = [
    ({"source": "a  b\nc", "target": " d "}, Example(source="a  b\nc", target=" d ")),
    (
        {"source": "a", "input": "b", "target": "", "table_id": None},
        Example(source="a", input="b", target=""),
    ),
    (
        {"instruction": "Sort.", "input": "3 1\n2", "output": "1 2 3", "text": "Below is …"},
        Example(source="Sort.", input="3 1\n2", target="1 2 3"),
    ),
    (
        {"instruction": "Say hi.", "input": None, "output": "Hi!"},
        Example(source="Say hi.", target="Hi!"),
    ),
    (
        {"instruction": "Why?", "context": "Because.", "response": "So.", "category": "qa"},
        Example(source="Why?", input="Because.", target="So."),
    ),
    (
        {"id": "1", "dialogue": "Ann: Hi!\r\nBo: Bye!", "summary": "They greet."},
        Example(source=SUMMARIZE, input="Ann: Hi!\r\nBo: Bye!", target="They greet."),
    ),
    (
        {"dialog": "Ann: Hi!", "summary": "Ann greets."},
        Example(source=SUMMARIZE, input="Ann: Hi!", target="Ann greets."),
    ),
    (
        {"id": 1, "document": "Long.", "summary": "Short."},
        Example(source="Summarize this document:", input="Long.", target="Short."),
    ),
    (
        {"article": "Long.", "highlights": "Short."},
        Example(source="Summarize this article:", input="Long.", target="Short."),
    ),
    ({"prompt": "1 + 1", "completion": 2}, Example(source="1 + 1", target="2")),
    (
        {"context": "A park.", "question": "Where?", "answer": "There."},
        Example(source="Where?", input="A park.", target="There."),
    ),
    ({"query": "a", "response": "", "type": "b"}, Example(source="a", target="")),
    (
        {"source": None, "target": None, "text": None, "query": "a", "response": "b"},
        Example(source="a", target="b"),
    ),
    ({"text": "Once upon\n a time", "url": "…"}, Example(source="", target="Once upon\n a time")),
]


@pytest.mark.parametrize(("raw", "row"), WRITTEN)
def test_instructions_dialogues_and_plain_text_keep_their_lines_and_pass_again_as_prepared(
    raw: dict[str, object], row: Example
) -> None:
    assert row_from(raw, "here") == row
    assert row_from(json.loads(row.to_json()), "here") == row
    assert row.asks != (raw.get("text") is not None and "instruction" not in raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"instruction": "a"},
            sentence("no known form of a row has the columns {}.", "here", "'instruction'")
            + sentence("A row has a question and an answer"),
        ),
        ({"instruction": " ", "output": "b"}, "here: instruction is empty"),
        (
            {"instruction": "a", "output": True},
            sentence("is {}; it must be text", "here: output", "true"),
        ),
        (
            {"instruction": "a", "output": float("nan")},
            sentence("is {}; it must be text", "here: output", "NaN"),
        ),
        ({"instruction": "a", "input": ["b"], "output": "c"}, r"here: input is \["),
        (
            {"summary": "a", "dialouge": "b"},
            sentence(
                "Did you mean {}? Rename the columns, or name them", "'dialogue' for 'dialouge'"
            ),
        ),
        ({"dialogue": "a", "summary": ""}, "here: summary is empty"),
        ({"text": ""}, "here: text is empty"),
        (
            {"text": "\ud800"},
            sentence("is {}; half a surrogate pair is not a letter", "here: text"),
        ),
        ({"source": "", "target": " "}, "here: source is empty"),
        (
            {"prompt": "a", "compl": "b"},
            sentence("Name the columns of the question and of the answer"),
        ),
        (
            {"id": 7, "a": "b"},
            sentence("no known form of a row has the columns {}.", "here", "'id', 'a'"),
        ),
        (
            {"id": 7, "article": "a", "abstract": "b"},
            sentence("Name the columns of the question and of the answer"),
        ),
        (
            {"query": "a", "response": ["b"]},
            sentence("is {}; it must be text", "here: response", '["b"]'),
        ),
        ({"question": " ", "answer": "b"}, "here: question is empty"),
    ],
)
def test_a_broken_row_of_text_names_the_place_and_the_field(
    raw: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        row_from(raw, "here")


def test_columns_of_other_names() -> None:
    columns = {"source": "body", "target": "title"}
    assert row_from(
        renamed({"body": "a", "title": "b", "text": "c"}, columns, "here"), "here"
    ) == Example(source="a", target="b")
    with pytest.raises(
        ConfigError,
        match=sentence("the column for {},", "here", "target", "title", "titel")
        + sentence("is not known")
        + sentence(": did you mean '{}'?"),
    ):
        renamed({"body": "a", "titel": "b"}, columns, "here")
    check_columns(columns)
    check_columns({"text": "body"})
    with pytest.raises(
        ConfigError,
        match=sentence("dataset columns: the field", "sauce", "source")
        + sentence("is not known")
        + sentence(": did you mean '{}'?"),
    ):
        check_columns({"sauce": "body", "target": "title"})
    with pytest.raises(
        ConfigError,
        match=sentence("also of one whose column has the field's name", "source", "target"),
    ):
        check_columns({"source": "body"})


@pytest.mark.parametrize(
    ("row", "path", "value", "message"),
    [
        (
            NAMED,
            "sql.agg",
            "MEDIAN",
            sentence("is not known", "here", "sql.agg 'MEDIAN'", "COUNT"),
        ),
        (
            NAMED,
            "sql.agg",
            ["MAX"],
            sentence("is not known", "here", "sql.agg ['MAX']"),
        ),
        (
            NAMED,
            "sql.conds.0.1",
            "LIKE",
            sentence("is not known", "here", "sql.conds[0][1] 'LIKE'"),
        ),
        (
            NAMED,
            "sql.conds.0.2",
            None,
            sentence("is {}; it must be text or a number", "here: sql.conds[0][2]", "null"),
        ),
        (NAMED, "sql.conds.0.2", True, r"here: sql.conds\[0\]\[2\] is true"),
        (
            NAMED,
            "sql.conds.0.2",
            float("inf"),
            sentence("is {}; the number is too large", "here: sql.conds[0][2]", "Infinity"),
        ),
        (
            NAMED,
            "sql.conds.0.2",
            2**64,
            sentence(
                "is {}; the number is too large",
                "here: sql.conds[0][2]",
                18446744073709551616,
            ),
        ),
        (
            NAMED,
            "sql.conds.0.2",
            "\ud800",
            sentence("is {}; half a surrogate pair is not a letter", "here: sql.conds[0][2]"),
        ),
        (
            NAMED,
            "sql.conds.0.0",
            3,
            sentence("is {}; it must be text", "here: sql.conds[0][0]", 3),
        ),
        (NAMED, "sql.conds.0.0", " ", r"here: sql.conds\[0\]\[0\] is empty"),
        (
            NAMED,
            "sql.conds.0",
            ["a", "="],
            sentence("is {}; it must be [column, operator, value]", "here: sql.conds[0]"),
        ),
        (NAMED, "sql.conds", {}, sentence("is {}; it must be a list", "here: sql.conds")),
        (
            NAMED,
            "sql.sel",
            ...,
            sentence("the key {} is missing; there is", "here", "sql.sel", "conds, agg"),
        ),
        (
            NAMED,
            "sql",
            "SELECT 1",
            sentence("is {}; it must be an object", "here", "sql", "SELECT 1"),
        ),
        (NAMED, "question", "  ", "here: question is empty"),
        (NAMED, "question", ..., sentence("the key {} is missing; there is", "here", "question")),
        (NAMED, "table_id", ..., sentence("the key {} is missing; there is", "here", "table_id")),
        (
            INDEXED,
            "table_id",
            "2-2",
            sentence("table_id {} is not in the tables file", "here", "2-2"),
        ),
        (
            INDEXED,
            "sql.sel",
            4,
            sentence("is {}; it must be a whole number from 0 to", "here: sql.sel", 4, 3),
        ),
        (INDEXED, "sql.sel", -1, "here: sql.sel is -1"),
        (INDEXED, "sql.sel", True, "here: sql.sel is true"),
        (
            INDEXED,
            "sql.agg",
            6,
            sentence("is {}; it must be a whole number from 0 to", "here: sql.agg", 6, 5),
        ),
        (
            INDEXED,
            "sql.conds.1.0",
            9,
            sentence("is {}; it must be a whole number from 0 to", "here: sql.conds[1][0]", 9, 3),
        ),
        (
            INDEXED,
            "sql.conds.1.1",
            3,
            sentence("is {}; it must be a whole number from 0 to", "here: sql.conds[1][1]", 3, 2),
        ),
        (
            INDEXED,
            "sql.sel",
            "Stat",
            sentence("is not known", "here", "sql.agg 3"),
        ),
        (
            HUB,
            "sql.conds.condition",
            ["x"],
            sentence(
                "has {} entries, column_index {}: they must be as many",
                "here: sql.conds.condition",
                1,
                2,
            ),
        ),
        (
            HUB,
            "table.header",
            [],
            sentence("is empty; a table has a column at least", "here: table: header"),
        ),
        (
            HUB,
            "table.types",
            ["text"],
            sentence("has {} entries for {} columns", "here: table: types", 1, 4),
        ),
        (
            HUB,
            "table.types",
            ["blob"] * 4,
            sentence("is not known", "here", "table: types 'blob'", "text, real"),
        ),
    ],
)
def test_a_broken_row_names_the_place_and_the_field(
    row: object, path: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        row_from(changed(row, path, value), "here", TABLES if row is INDEXED else None)


def test_a_named_column_must_be_in_the_table() -> None:
    row = changed(NAMED, "table_id", "1-1000181-1")
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "here", "column 'Position'", "State"),
    ):
        row_from(row, "here", TABLES)


@pytest.mark.parametrize("row", [None, 5, "x", [], [1]])
def test_a_line_must_be_an_object(row: object) -> None:
    with pytest.raises(
        ConfigError, match=sentence("is {}; it must be an object", "here", "the line")
    ):
        row_from(row, "here")


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["a"]], sentence("is {}; it must be a list of {} cells", "rows[0]", '["a"]', 4)),
        (
            [["a", "b", "c", []]],
            sentence("has the cell {}; a cell is text, a number or null", "rows[0]"),
        ),
    ],
)
def test_a_broken_table_names_the_row(cells: object, message: str) -> None:
    with pytest.raises(ConfigError, match="line 1: " + message):
        table_from({**TABLE, "rows": cells}, "tables.jsonl, line 1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["sel", "agg", "conds", "sql", "question", "table_id", "table"]), inner
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    st.sampled_from([NAMED, INDEXED, HUB]),
    st.sampled_from(["sql", "question", "table_id", "table"]),
    JSON,
)
def test_whatever_stands_in_a_line_the_error_is_ours(
    row: dict[str, object], key: str, junk: object
) -> None:
    tables: dict[str, SqlTable] | None = TABLES if row is INDEXED else None
    try:
        made = row_from({**row, key: junk}, "here", tables)
    except ConfigError as error:
        assert str(error).startswith("here: ")
    else:
        assert parse(made.target) is not None


def test_all_real_rows_convert_and_read_back(shared_data: Path) -> None:
    counts = []
    for name in ("train.jsonl", "eval.jsonl"):
        count = 0
        for where, data in read_lines(shared_data / name):
            count += 1
            query = parse(row_from(data, where).target)
            sql = data["sql"]  # type: ignore[index]
            assert query is not None
            assert (query.aggregate, query.select) == (sql["agg"], _plain(sql["sel"])), where
            assert [list(c) for c in query.conditions] == [
                [_plain(c), o, _plain(v)] for c, o, v in sql["conds"]
            ], where
            assert [type(c.value) for c in query.conditions] == [
                type(v) for _, _, v in sql["conds"]
            ], where
        counts.append(count)
    assert counts[0] == 15_927
    assert counts[1] > 1000


def _plain(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value
