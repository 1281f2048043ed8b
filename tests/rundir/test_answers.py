from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.finetune.data.scoring import Answer, judge, share, write_answers


@pytest.mark.parametrize(
    ("expected", "predicted", "same"),
    [
        ("SELECT a FROM table", "SELECT a FROM table", True),
        ("SELECT a FROM table", "  SELECT  a\nFROM table ", True),
        ("SELECT a FROM table", "SELECT A FROM table", False),
        ("SELECT a FROM table", "SELECT a FROM tabl", False),
        ("SELECT a FROM table", "", False),
    ],
)
def test_an_answer_counts_when_only_white_space_differs(
    expected: str, predicted: str, same: bool
) -> None:
    assert judge("q", expected, predicted).exact_match is same


def test_the_share_of_exact_answers() -> None:
    answers = [judge("q", "a", text).exact_match for text in ("a", "b", "a", "c")]
    assert share(answers) == 0.5
    assert share([]) is None


def test_predictions_are_one_object_a_line(tmp_path: Path) -> None:
    answers = [
        Answer(source="Wo?\n", expected="é", predicted="東", exact_match=False, table_id="t-1")
    ] * 2
    write_answers(tmp_path / "predictions.jsonl", answers)
    lines = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "source": "Wo?\n",
            "expected": "é",
            "predicted": "東",
            "exact_match": False,
            "table_id": "t-1",
        }
    ] * 2
