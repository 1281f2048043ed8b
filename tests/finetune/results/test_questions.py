from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.support.sentences import sentence
from workbench import Run
from workbench.base.errors import ConfigError, RunError
from workbench.finetune.answers.ask import chat
from workbench.finetune.answers.questions import Question, questions_of, tables_of
from workbench.finetune.data.forms.table import SUMMARIZE
from workbench.finetune.data.rows import row_from
from workbench.finetune.data.sources.dataset import prepare
from workbench.finetune.data.tasks import TASK
from workbench.finetune.data.wikisql.datasets import Mini
from workbench.rundir.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.inputs.mkdir(parents=True)
    prepare(Mini(train_rows=3, eval_rows=80), paths.inputs)
    return paths


def evaluation(paths: RunPaths) -> list[dict[str, str]]:
    return [json.loads(line) for line in (paths.inputs / "eval.jsonl").read_text().splitlines()]


def test_a_run_is_asked_its_own_evaluation_rows(paths: RunPaths) -> None:
    rows = evaluation(paths)
    asked = questions_of(paths)
    assert len(asked) == 64
    assert asked[0] == Question(
        source=rows[0]["source"], expected=rows[0]["target"], table_id=rows[0]["table_id"]
    )
    paths.job.write_text(json.dumps({"job": {"predict_rows": 7}}))
    assert len(questions_of(paths)) == 7
    paths.job.write_text(json.dumps({"job": {"predict_rows": 0}}))
    assert len(questions_of(paths)) == 64


def test_a_typed_question_gets_the_instruction_and_what_is_known(paths: RunPaths) -> None:
    known = evaluation(paths)[5]
    bare = known["source"].removeprefix(TASK.prefix)
    assert bare != known["source"]
    asked = questions_of(paths, [bare, known["source"], "Who was it?"])
    assert (
        asked[0]
        == asked[1]
        == Question(source=known["source"], expected=known["target"], table_id=known["table_id"])
    )
    assert asked[2] == Question(source=TASK.prefix + "Who was it?")


def test_a_row_may_have_the_columns_that_the_job_named(paths: RunPaths) -> None:
    columns = {"source": "Order: {note}", "target": "about.summary"}
    dataset = {"kind": "files", "train": "orders.csv", "columns": columns}
    paths.job.write_text(json.dumps({"job": {"dataset": dataset}}))
    rows: list[dict[str, object]] = [
        {"note": "two lamps", "id": 7},
        {"note": "a desk", "about": {"summary": "desk"}},
        {"source": "a chair", "target": "chair"},
    ]
    assert questions_of(paths, rows) == [
        Question(source="Order: two lamps"),
        Question(source="Order: a desk", expected="desk"),
        Question(source="a chair", expected="chair"),
    ]
    with pytest.raises(
        ConfigError, match=sentence("no known form of a row has the columns {}.", "'id'")
    ):
        questions_of(paths, [{"id": 7}])


def test_rows_without_instruction_get_none(paths: RunPaths) -> None:
    (paths.inputs / "eval.jsonl").write_text('{"source": "Guten Tag", "target": "Hello"}\n')
    assert questions_of(paths, ["Tag"]) == [Question(source="Tag")]
    assert questions_of(paths, ["Guten Tag"]) == [Question(source="Guten Tag", expected="Hello")]


def test_a_question_with_two_answers_has_none(paths: RunPaths) -> None:
    (paths.inputs / "eval.jsonl").write_text(
        '{"source": "a", "target": "b"}\n{"source": "a", "target": "c"}\n'
    )
    assert questions_of(paths, ["a"]) == [Question(source="a")]


def test_a_run_of_a_hub_dataset_is_asked_what_it_answered(paths: RunPaths) -> None:
    (paths.inputs / "eval.jsonl").unlink()
    paths.predictions.write_text(
        '{"source": "q", "expected": "x", "predicted": "y", "exact_match": false}\n'
    )
    assert questions_of(paths) == [Question(source="q", expected="x")]
    paths.predictions.write_text("")
    with pytest.raises(
        RunError, match=sentence("the run in {} has no evaluation rows; give rows to answer")
    ):
        questions_of(paths)


def test_instructions_are_asked_with_their_input(paths: RunPaths) -> None:
    rows = [
        {"source": "Sort.", "input": "3 1\n2", "target": "1 2 3"},
        {"source": "Stay.", "target": ""},
    ]
    (paths.inputs / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sort, stay = questions_of(paths)
    assert sort == Question(source="Sort.", input="3 1\n2", expected="1 2 3")
    assert (stay.expected, sort.text) == ("", "Sort.\n3 1\n2")
    asked = questions_of(
        paths,
        [
            {"instruction": "Sort.", "input": "2 1"},
            {"instruction": "Why?", "context": "Because.", "response": "So."},
            {"dialogue": "Ann: Hi!"},
            {"dialog": "Ann: Hi!", "summary": "Ann greets."},
            "Sort.\n3 1\n2",
        ],
    )
    assert asked == [
        Question(source="Sort.", input="2 1"),
        Question(source="Why?", input="Because.", expected="So."),
        Question(source=SUMMARIZE, input="Ann: Hi!"),
        Question(source=SUMMARIZE, input="Ann: Hi!", expected="Ann greets."),
        sort,
    ]


def test_a_model_of_plain_text_goes_on_with_what_it_is_given(paths: RunPaths) -> None:
    (paths.inputs / "eval.jsonl").write_text(
        '{"source": "", "target": "Once upon a time", "table_id": null}\n'
    )
    with pytest.raises(RunError, match=sentence("give texts for its model to continue")):
        questions_of(paths)
    assert questions_of(paths, ["Once ", {"text": "Twice\nupon"}]) == [
        Question(source="", opening="Once "),
        Question(source="", opening="Twice\nupon"),
    ]


def test_objects_are_taken_as_they_are(paths: RunPaths) -> None:
    sql = {"sel": "Round", "agg": "", "conds": [["Circuit", "=", "Assen"]]}
    asked = questions_of(
        paths,
        [
            {"source": "a"},
            {"source": "a", "target": "b", "table_id": "1"},
            {"source": "a", "target": None},
            {"table_id": "1-1", "question": "Where?", "sql": sql},
        ],
    )
    assert asked[0] == asked[2] == Question(source="a")
    assert asked[1] == Question(source="a", expected="b", table_id="1")
    assert asked[3].expected == "SELECT Round FROM table WHERE Circuit = Assen"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("one", sentence("rows is a single row; give a list of rows")),
        ([" "], sentence("is empty", "rows[0]")),
        (["a", 5], r"rows\[1\] is int"),
        (
            [{"target": "b"}],
            sentence("no known form of a row has the columns {}.", "rows[0]", "'target'"),
        ),
        ([{"source": [5]}], r"rows\[0\].*source"),
    ],
)
def test_a_row_of_no_known_form_is_named(paths: RunPaths, rows: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        questions_of(paths, rows)  # type: ignore[arg-type]


def test_only_the_tables_asked_are_read_and_the_first_run_wins(
    paths: RunPaths, tmp_path: Path
) -> None:
    asked = questions_of(paths)[:3]
    found = tables_of([RunPaths(tmp_path / "none"), paths], asked)
    assert set(found) == {question.table_id for question in asked}
    paths.tables.write_text("{\n")
    with pytest.raises(RunError, match=sentence("the tables in {} cannot be read")):
        tables_of([paths], asked)
    assert tables_of([paths], [Question(source="a")]) == {}


def test_chats_are_asked_with_what_was_said_before(paths: RunPaths) -> None:
    turns = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "Hi"),
            ("assistant", "Hello."),
            ("user", "1+1?"),
            ("assistant", "2"),
        )
    ]
    prepared = row_from({"messages": turns, "table_id": "1-1"}, "here")
    (paths.inputs / "eval.jsonl").write_text(prepared.to_json() + "\n")
    question = Question(source="1+1?", expected="2", table_id="1-1", messages=tuple(turns[:3]))
    assert questions_of(paths) == [question]
    asked = questions_of(paths, [turns[:1], turns, {"messages": turns[:3]}, "1+1?"])
    assert asked == [
        Question(source="Hi", messages=tuple(turns[:1])),
        Question(source="1+1?", expected="2", messages=tuple(turns[:3])),
        Question(source="1+1?", messages=tuple(turns[:3])),
        Question(source="1+1?"),  # it was said after something else
    ]
    with pytest.raises(ConfigError, match=sentence("rows is a single chat")):
        questions_of(paths, turns)
    with pytest.raises(
        ConfigError,
        match=sentence("is not known", "rows[0]", "messages[0].role 'me'"),
    ):
        questions_of(paths, [[{"role": "me", "content": "Hi"}]])


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            {"model": "me/plain"},
            sentence("because the model has no chat template", "me/plain"),
        ),
        (
            {"prompt": "alpaca", "chat_template": "{{ messages }}"},
            sentence("asks its model by prompt", "alpaca"),
        ),
    ],
)
def test_a_chat_without_a_template_is_refused_at_the_call(
    paths: RunPaths, job: dict[str, str], words: str
) -> None:
    paths.model.mkdir()
    (paths.model / "config.json").write_text("{}")
    (paths.model / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    paths.job.write_text(json.dumps({"job": job}))
    with pytest.raises(ConfigError, match=words):
        chat(cast(Run, SimpleNamespace(id="run", paths=paths)))


def test_a_row_that_asks_about_an_image_is_refused(paths: RunPaths) -> None:
    asked = {"prompt": "What is this?", "image": "a.png"}
    with pytest.raises(
        ConfigError,
        match=sentence("and FineTune learns from text alone", "rows[0]", "image")
        + sentence("the column {} {}; or drop the column"),
    ):
        questions_of(paths, [asked])
    assert questions_of(paths, [{**asked, "image": None}]) == [Question(source="What is this?")]


def test_a_prompt_of_messages_is_asked_as_a_chat(paths: RunPaths) -> None:
    prompt, answer = [{"role": "user", "content": "1+1?"}], [{"role": "assistant", "content": "2"}]
    asked = questions_of(paths, [{"prompt": prompt}, {"prompt": prompt, "completion": answer}])
    assert [question.expected for question in asked] == [None, "2"]
    assert all(question.messages == tuple(prompt) for question in asked)


def test_a_question_keeps_the_system_text_the_history_and_the_options(paths: RunPaths) -> None:
    row = {"instruction": "second", "system": "Be brief.", "history": [["first", "one"]]}
    for expected in (None, "two"):
        (asked,) = questions_of(paths, [{**row, "output": expected}])
        assert [turn["role"] for turn in asked.messages] == ["system", "user", "assistant", "user"]
        assert (asked.source, asked.expected) == ("second", expected)
    choices = {"question": "Which?", "choices": ["red", "blue"]}
    (open_end, known) = questions_of(paths, [choices, {**choices, "answer": 1}])
    assert open_end.source == known.source == "Which?\nA. red\nB. blue"
    assert (open_end.expected, known.expected) == (None, "B. blue")
