"""Wrong answers stand first, and right ones keep half of a table that does not show all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.display.records.answers import predictions_grid
from workbench.finetune.answers.predictions import Predictions
from workbench.finetune.data.scoring import judge


def predictions(right: list[bool]) -> Predictions:
    rows = [judge(f"q{n}", "yes", "yes" if each else "no") for n, each in enumerate(right)]
    return Predictions(tuple(rows))


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 12))
def test_every_row_has_its_place(right: list[bool], limit: int) -> None:
    grid = predictions_grid(predictions(right), limit)
    shown = [(row[0] == "✓", str(row[1])) for row in grid.rows]
    assert len(shown) == min(limit, len(right))
    marks = [mark for mark, _ in shown]
    assert marks == sorted(marks)
    most = max(limit // 2, limit - sum(right))
    assert marks.count(False) == min(right.count(False), most)
    for wanted in (False, True):
        names = [f"q{n}" for n, each in enumerate(right) if each is wanted]
        assert [name for mark, name in shown if mark is wanted] == names[: marks.count(wanted)]


@pytest.mark.parametrize("limit", [1, 5])
def test_rows_without_a_known_answer_keep_their_order(limit: int) -> None:
    rows = tuple(judge(f"q{n}", None, "x") for n in range(4))
    grid = predictions_grid(Predictions(rows), limit)
    assert [str(row[0]) for row in grid.rows] == [f"q{n}" for n in range(min(limit, 4))]
