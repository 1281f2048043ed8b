from __future__ import annotations

import hashlib
from collections import Counter
from itertools import islice

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.tasks import TASK
from workbench.finetune.data.wikisql.mini import MAX_ROWS, mini_rows, mini_tables
from workbench.finetune.data.wikisql.query import AGGREGATES, OPERATORS, fold, format_query, parse
from workbench.finetune.data.wikisql.tables import execute


def test_there_are_some_forty_tables_with_rows() -> None:
    tables = mini_tables()
    assert 35 <= len(tables) <= 45
    assert len({table.id for table in tables}) == len(tables)
    for table in tables:
        assert len(table.rows) >= 6
        assert {"text", "real"} == set(table.types)
        assert len({fold(name) for name in table.header}) == len(table.header)
        for row in table.rows:
            assert all(
                isinstance(cell, int) == (kind == "real")
                for cell, kind in zip(row, table.types, strict=True)
            )


def test_every_question_can_be_run_and_names_what_it_asks_for() -> None:
    tables = {table.id: table for table in mini_tables()}
    seen: Counter[object] = Counter()
    for row in mini_rows(0, 4400):
        query = parse(row.target)
        assert query is not None
        assert format_query(query) == row.target
        answer = execute(query, tables[str(row.table_id)])
        assert answer and answer[0] is not None, row
        assert row.source.startswith(TASK.prefix)
        for word in (
            query.select,
            *(c.column for c in query.conditions),
            *(str(c.value) for c in query.conditions),
        ):
            assert word in row.source
        seen.update(
            [
                query.aggregate,
                len(query.conditions),
                *{c.operator for c in query.conditions},
                row.table_id,
            ]
        )
    for wanted in (*AGGREGATES, *OPERATORS, 0, 1, 2, 3, *tables):
        assert seen[wanted] >= 40, wanted


def test_the_same_seed_gives_the_same_bytes_on_every_machine() -> None:
    lines = "\n".join(row.to_json() for row in mini_rows(7, 500)).encode()
    assert (
        hashlib.sha256(lines).hexdigest()
        == "2694e7c0f7cb740b937bb6649e0fd2a7b54c96221b6091582c86c28e7800f071"
    )
    assert list(mini_rows(7, 20)) == list(islice(mini_rows(7, 500), 20))
    assert list(mini_rows(8, 20)) != list(mini_rows(7, 20))


def test_no_question_comes_twice() -> None:
    sources = [row.source for row in mini_rows(3, 20_000)]
    assert len(set(sources)) == 20_000


@pytest.mark.long
def test_there_are_as_many_as_promised() -> None:
    assert sum(1 for _ in mini_rows(0, MAX_ROWS)) == MAX_ROWS


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=sentence("train and eval together", 100001)):
        next(mini_rows(0, MAX_ROWS + 1))
