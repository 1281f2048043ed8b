from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.answers.predictions import Predictions, judge_answers, read_predictions
from workbench.finetune.data.scoring import judge
from workbench.finetune.data.sources.dataset import prepare
from workbench.finetune.data.wikisql.datasets import Mini
from workbench.finetune.data.wikisql.mini import mini_tables
from workbench.finetune.data.wikisql.tables import SqlTable

TABLE = SqlTable(
    id="t", header=("town", "year"), types=("text", "real"), rows=(("Graz", 1990), ("Linz", 2003))
)
EXPECTED = "SELECT town FROM table WHERE year = 1990"


@pytest.mark.parametrize(
    ("expected", "predicted", "verdicts"),
    [
        (EXPECTED, EXPECTED, (True, True, True)),
        (EXPECTED, "SELECT  town FROM table WHERE year  = 1990", (True, True, True)),
        (EXPECTED, "SELECT Town FROM table WHERE YEAR = 1990.0", (False, True, True)),
        (EXPECTED, "SELECT town FROM table WHERE year < 2000", (False, False, True)),
        (EXPECTED, "SELECT year FROM table WHERE year = 1990", (False, False, False)),
        (EXPECTED, "SELECT mayor FROM table", (False, False, False)),
        (EXPECTED, "SELECT town FROM table WHERE year = never", (False, False, False)),
        (EXPECTED, "", (False, False, False)),
        ("SELECT mayor FROM table", "SELECT mayor FROM table", (True, True, None)),
        ("Guten Tag", "Guten Tag", (True, None, None)),
    ],
)
def test_verdicts(expected: str, predicted: str, verdicts: tuple[bool | None, ...]) -> None:
    made = judge("?", expected, predicted, table=TABLE)
    assert (made.exact_match, made.logical_match, made.execution_match) == verdicts


def test_without_a_table_nothing_is_run() -> None:
    assert judge("?", EXPECTED, EXPECTED).execution_match is None


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_runs_answers_are_read_judged_and_run(tmp_path: Path) -> None:
    made = prepare(Mini(train_rows=5, eval_rows=6), tmp_path)
    assert made.eval is not None
    rows = [json.loads(line) for line in made.eval.read_text().splitlines()]
    answers = [
        {"source": r["source"], "expected": r["target"], "predicted": r["target"]} for r in rows
    ]
    answers[0]["predicted"] = "SELECT nothing"
    answers[1]["predicted"] = answers[1]["predicted"].lower()
    read = read_predictions(write(tmp_path / "predictions.jsonl", *answers), made.tables)
    assert len(read) == 6
    assert read.exact_match == pytest.approx(4 / 6)
    assert read.logical_match == read.execution_match == pytest.approx(5 / 6)
    assert [row.table_id for row in read] == [row["table_id"] for row in rows]
    assert (
        repr(read) == "Predictions(6 answers, 66.7 % exactly right, "
        "83.3 % the same logic, 83.3 % the same result)"
    )
    assert judge_answers(rows, [answer["predicted"] for answer in answers], made.tables) == read
    with pytest.raises(
        ConfigError,
        match=sentence("answers to {} rows: give one for each, in the same order", 5, 6),
    ):
        judge_answers(rows, ["…"] * 5)
    without = read_predictions(tmp_path / "predictions.jsonl")
    assert without.execution_match is None
    assert without.logical_match == read.logical_match


def test_every_expected_answer_of_mini_gives_its_own_result(tmp_path: Path) -> None:
    made = prepare(Mini(train_rows=1, eval_rows=300), tmp_path)
    tables = {table.id: table for table in mini_tables()}
    assert made.eval is not None
    for line in made.eval.read_text().splitlines():
        row = json.loads(line)
        assert (
            judge(
                row["source"], row["target"], row["target"], table=tables[row["table_id"]]
            ).execution_match
            is True
        )


def test_a_question_asked_of_two_tables_is_not_run_on_the_wrong_one(tmp_path: Path) -> None:
    made = prepare(Mini(train_rows=1, eval_rows=1), tmp_path)
    assert made.eval is not None
    row = json.loads(made.eval.read_text())
    write(made.eval, row, {**row, "table_id": "mini-9"})
    answer = {"source": row["source"], "expected": row["target"], "predicted": row["target"]}
    path = write(tmp_path / "predictions.jsonl", answer, {**answer, "table_id": row["table_id"]})
    assert [row.execution_match for row in read_predictions(path, made.tables)] == [None, True]


def test_differing_words_are_marked_in_text_and_html() -> None:
    row = judge(
        "translate to SQL: Where <b>?",
        EXPECTED,
        EXPECTED.replace("town", "<img src=x onerror=alert(1)>"),
    )
    shown = Predictions((row,))
    text, page = str(shown), shown._repr_html_()
    assert "SELECT [town] FROM table" in text
    assert "[<img src=x onerror=alert(1)>]" in " ".join(text.split())
    assert ">town</mark> FROM table WHERE year = 1990" in page
    assert "&lt;img src=x onerror=alert(1)&gt;</mark>" in page
    assert "<img" not in page
    assert "<b>" not in page
    assert "translate to SQL" not in text + page
    for word in ("1 answer, 0.0 % exactly right", "✗"):
        assert word in text
        assert word in page


def test_only_the_first_are_shown_and_the_caption_says_so() -> None:
    shown = Predictions(tuple(judge(str(i), EXPECTED, EXPECTED) for i in range(30)))
    assert len(shown.table(limit=20).rows) == 20
    assert "30 answers, 100.0 % exactly right, 100.0 % the same logic (the first 20 shown)" in str(
        shown
    )


def test_no_answers_are_no_error(tmp_path: Path) -> None:
    empty = read_predictions(write(tmp_path / "predictions.jsonl"))
    assert (len(empty), empty.exact_match, str(empty).splitlines()[0]) == (0, None, "0 answers")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"source": "a"}\n', sentence("the key {} is missing; there is", "line 1", "expected")),
        (
            '{"sour',
            sentence("; the file ends within the line: was the file copied whole?", "line 1")
            + sentence("is not JSON"),
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "predictions.jsonl"
    path.write_text(content)
    with pytest.raises(RunError, match=message):
        read_predictions(path)
    with pytest.raises(RunError, match="nowhere"):
        read_predictions(tmp_path / "nowhere.jsonl")
