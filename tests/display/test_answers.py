from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sentences import says, sentence
from workbench.base.errors import ConfigError
from workbench.base.table import Marked
from workbench.base.words import UNKNOWN
from workbench.display.records.answers import answers_grids, marked_words
from workbench.finetune.answers.predictions import Answers, Predictions
from workbench.finetune.data.scoring import Answer

EXPECTED = "SELECT town FROM table WHERE year = 1990"
EVIL = "<img src=x onerror=alert(1)>"


def answer(text: str, expected: str | None = EXPECTED) -> Answer:
    same = None if expected is None else text == expected
    source = "translate to SQL: Where <b>?"
    return Answer(
        source=source, expected=expected, predicted=text, exact_match=same, logical_match=same
    )


def answered(*answers: Answer) -> Predictions:
    return Predictions(answers)


ONE = Answers(
    names=("answered",),
    models=(answered(answer(EXPECTED), answer(EXPECTED.replace("town", EVIL)), answer("")),),
    answer_s=1.5,
)
TWO = Answers(
    names=("before training", EVIL),
    models=(
        answered(answer(""), answer("a b", None), answer(EXPECTED)),
        answered(answer(EXPECTED), answer("a c", None), answer("SELECT town")),
    ),
    load_s=2.0,
    answer_s=1.0,
)


@pytest.mark.parametrize("answers", [ONE, TWO], ids=["one", "two"])
def test_text_and_html_state_the_same(answers: Answers) -> None:
    text, page = str(answers), answers._repr_html_()
    assert "<img" not in page
    assert "<b>" not in page
    shown = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    for word in re.sub(r"[\[\]]|-{3,}", " ", text).split():
        assert word in shown
    assert text == str(answers)


def test_one_model_has_a_column_for_each_verdict() -> None:
    text = " ".join(str(ONE).split())
    assert "3 rows; 33.3 % exactly right, 33.3 % the same logic; answered in 1.5 s" in text
    assert f"SELECT [{EVIL}] FROM" in text
    assert "(nothing)" in text
    assert ONE.exact_match() == pytest.approx(1 / 3)
    assert ONE.execution_match() is None
    assert repr(ONE) == "Answers(3 rows; 33.3 % exactly right, 33.3 % the same logic)"


def test_verdicts_that_no_answer_has_are_no_columns() -> None:
    asked = Answer(source="How many?", expected="5", predicted="5", exact_match=True)
    one = Answers(names=["answered"], models=[answered(asked)])
    two = Answers(names=["before", "after"], models=[answered(asked), answered(asked)])
    assert answers_grids(one)[0].columns == ["exact", "question", "expected", "answered"]
    assert answers_grids(two)[0].columns == ("model", "exactly right")
    assert answers_grids(ONE)[0].columns == ["exact", "logic", "question", "expected", "answered"]
    run = replace(asked, execution_match=False)
    rows = answers_grids(Answers(names=["answered"], models=[answered(asked, run)]))[0].rows
    assert [row[:2] for row in rows] == [["✓", UNKNOWN], ["✓", "✗"]]


def test_answers_are_data_and_the_wrong_ones_stand_alone() -> None:
    (model,) = ONE.models
    assert [row.predicted for row in model.wrong] == [EXPECTED.replace("town", EVIL), ""]
    assert len(answered(answer("x", None)).wrong) == 0, "nobody knows"
    frame = model.to_dataframe()
    assert list(frame.columns)[:4] == ["source", "expected", "predicted", "exact_match"]
    assert list(frame["exact_match"]) == [True, False, False]
    both = TWO.to_dataframe()
    assert list(both["model"]) == ["before training"] * 3 + [EVIL] * 3
    assert list(answered().to_dataframe().columns) == list(frame.columns)


def test_words_are_marked_only_where_most_are_right() -> None:
    wrong = answered(answer("people of the town"), answer(EXPECTED.replace("town", "city")))
    page = wrong._repr_html_()
    assert page.count("<mark") == 2
    assert ">city</mark>" in page
    assert "✗" in page


def test_several_models_stand_side_by_side() -> None:
    shares, rows = str(TWO).split("\n\n")
    assert re.search(r"before training +50.0 %", shares)
    assert says(rows, "after {} of loading", "2.0 s")
    assert TWO.exact_match("before training") == 0.5
    assert TWO.texts(EVIL) == [EXPECTED, "a c", "SELECT town"]
    # Nobody knows the second answer: it is held against the first model's.
    assert re.search(r"–\s+a b\s+–\s+a \[c\]\s+–", rows)
    with pytest.raises(
        ConfigError, match=sentence("there are no answers of {}; there are", "before training")
    ):
        TWO.exact_match("nobody")


def test_only_the_first_are_shown_and_the_caption_says_so() -> None:
    many = Answers(names=("answered",), models=(answered(*[answer(EXPECTED)] * 60),))
    assert "60 rows" in str(many)
    assert says(many, "the first {} shown", 50)
    assert many._repr_html_().count("<tr>") == 51


@given(st.text("ab <\n"), st.text("ab <\n"))
def test_marks_leave_out_no_word_and_mark_none_of_equal_texts(one: str, other: str) -> None:
    left, right = marked_words(one, other)

    def words(marked: Marked) -> list[str]:
        return [word for text, _ in marked.parts for word in text.split()]

    assert words(left) == one.split()
    assert words(right) == other.split()
    same = one.split() == other.split()
    assert any(m for _, m in (*left.parts, *right.parts)) is not same
