"""Every form of rows, in every format: nothing that a row says is lost without a word."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.forms.table import (
    FORMS,
    GIVEN,
    PAIRS,
    PROMPT_KEYS,
    suggested_columns,
)
from workbench.finetune.data.lines import EmptyField
from workbench.finetune.data.rows import Example, prepared_row, renamed, row_from
from workbench.finetune.data.sources.dataset import Prepared, dataset_from, prepare
from workbench.finetune.data.sources.read import table_row
from workbench.finetune.data.training.rows import load
from workbench.finetune.job.checked_rows import row_refusal
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.methods.rows import rejected_of, with_rejected

Row = Mapping[str, Any]
SPACED = "\tdef g():\r\n        pass\n\n"
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows; a cell of a CSV file has lists and objects as JSON text."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            to = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            to.writeheader()
            for row in rows:
                to.writerow({name: cell(value) for name, value in row.items()})
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, list | dict) else value


def prepared(path: Path, method: str = "sft", **options: object) -> Prepared:
    dataset = dataset_from({"kind": "files", "train": str(path), "eval_share": 0.5, **options})
    return prepare(dataset, path.parent / f"of-{path.name}", reader=method_of(method).rows)


def lines(made: Prepared) -> list[Example]:
    assert made.train is not None and made.eval is not None
    rows = [*made.train.read_text().splitlines(), *made.eval.read_text().splitlines()]
    return [prepared_row(json.loads(row)) for row in rows]


# Marks of turns.

LEARNED = [
    *("weight", "loss", "train", "trainable", "loss_weight", "loss_scale", "do_train", "is_loss"),
    *("should_learn", "output_with_loss", "includeInLoss", "use_for_training", "enable-loss"),
    *("train_on_turn", "training", "loss_mask", "step_loss_mask", "Learn"),
]
FALSE = [False, 0, 0.0, "false", "False"]


def marked(name: str, value: object) -> list[dict[str, Any]]:
    turns = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "bad", name: value}]
    return [*turns, {"from": "human", "value": "Again."}, {"from": "gpt", "value": "2"}]


@pytest.mark.parametrize("name", LEARNED)
def test_a_turn_marked_as_not_learned_is_read_alone(name: str) -> None:
    for value in FALSE:
        row = row_from({"conversations": marked(name, value)}, "here")
        assert [turn.get("weight") for turn in row.messages] == [None, 0, None, None]
        with pytest.raises(ConfigError, match="has no turn of the assistant to learn from"):
            row_from({"conversations": marked(name, value)[:2]}, "here")
    row = row_from({"conversations": marked(name, True)}, "here")
    assert all("weight" not in turn for turn in row.messages)


MASKED = ["masked", "is_masked", "ignore", "no_loss", "do_not_train", "notTrainable", "skip_loss"]


@pytest.mark.parametrize("name", [*MASKED, "mask-loss", "without_loss", "exclude_from_training"])
def test_a_mark_of_masking_is_the_inverse(name: str) -> None:
    row = row_from({"messages": [CHAT[0], {**CHAT[1], name: 0}]}, "here")
    assert row.messages == tuple(CHAT)
    with pytest.raises(ConfigError, match="has no turn of the assistant to learn from"):
        row_from({"messages": [CHAT[0], {**CHAT[1], name: True}]}, "here")


@pytest.mark.parametrize("value", [0.5, -1, 2, "some", [], {}])
def test_a_mark_between_learned_and_not_learned_is_refused_by_name(value: object) -> None:
    for name in LEARNED:
        with pytest.raises(ConfigError, match=rf"here: conversations\[1\]\.{name} is "):
            row_from({"conversations": marked(name, value)}, "here")


@pytest.mark.parametrize(
    ("turn", "name"),
    [
        ({"weight": 1, "train": False}, "weight"),
        ({"mask": 1}, "mask"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail"),
    ],
)
def test_marks_without_one_meaning_are_refused_by_name(turn: Row, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"here: messages\[1\]\.{name} "):
        row_from({"messages": [CHAT[0], {**CHAT[1], **turn}]}, "here")


# Marks of rows.

ROW_FALSE = [*FALSE, "no", "0", "0.0"]
OF_METHODS: Mapping[str, Row] = {
    "sft": {"question": "1+1?", "answer": "2"},
    "dpo": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    "kto": {"prompt": "1+1?", "completion": "2", "label": True},
    "grpo": {"prompt": "1+1?", "result": 2},
}


# Every method reads every format, and every name of a mark.
MARKED_ROWS = [
    *((method, end, "weight") for method in OF_METHODS for end in ("json", "csv")),
    *((method, "jsonl", name) for method in OF_METHODS for name in [*LEARNED, "sample_weight"]),
]


@pytest.mark.parametrize(("method", "end", "name"), MARKED_ROWS)
def test_a_row_marked_as_not_learned_is_left_out_and_counted(
    tmp_path: Path, name: str, method: str, end: str
) -> None:
    row = OF_METHODS[method]
    # Marked rows need no answer, and rows without a value have no mark.
    rows = [{**row, name: True}, {**row, name: 1}, {**row, name: None}]
    rows += [{**dict.fromkeys(row), name: value} for value in ROW_FALSE]
    made = prepared(write(tmp_path / f"rows.{end}", rows), method)
    assert (made.train_rows + made.eval_rows, made.not_read) == (3, [])
    [(remark, count)] = [each for each in made.remarks.items() if "mark" in each[0]]
    assert (remark, count) == (f"the mark '{name}' not to learn the row (left out)", len(ROW_FALSE))


@pytest.mark.parametrize(
    "name",
    [
        *("skip", "exclude_from_training", "masked", "doNotTrain"),
        *("discard", "is_deleted", "removed", "drop_row", "to_delete", "invalid", "do_not_use"),
    ],
)
def test_a_mark_of_a_row_to_leave_out_is_the_inverse(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"{name} {value}", name: value} for value in (0, False, None, 1, "yes")]
    made = prepared(write(tmp_path / "rows.jsonl", rows))
    assert sorted(row.target.split()[1] for row in lines(made)) == ["0", "False", "None"]


def test_a_mark_of_rows_beside_named_columns_is_read(tmp_path: Path) -> None:
    rows = [{"a": "1+1?", "b": str(number), "weight": number % 2} for number in range(6)]
    path = write(tmp_path / "rows.jsonl", rows)
    columns = {"source": "a", "target": "b"}
    assert sorted(row.target for row in lines(prepared(path, columns=columns))) == ["1", "3", "5"]
    # A column that a field reads, or that is to be ignored, is no mark.
    made = prepared(path, columns={"source": "a", "target": "weight"})
    assert (made.train_rows + made.eval_rows, made.remarks) == (6, {})
    made = prepared(path, columns=columns, ignore=["weight"])
    assert (made.train_rows + made.eval_rows, made.not_read) == (6, ["weight"])


@pytest.mark.parametrize(
    "marks",
    [
        *({"weight": 0.5}, {"weight": "0.5"}, {"skip": 3}, {"mask": 1}, {"filtered": True}),
        *({"loss": 1, "train": False}, {"keep": 1, "is_valid": False}),
    ],
)
@pytest.mark.parametrize("method", OF_METHODS)
def test_a_mark_of_a_row_without_one_meaning_is_refused_with_the_way_out(
    tmp_path: Path, marks: Row, method: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [{**OF_METHODS[method], **marks}] * 2)
    way = sentence("To learn the rows in spite of the column", next(iter(marks)))
    with pytest.raises(ConfigError, match=way):
        prepared(path, method)
    made = prepared(path, method, ignore=[*marks])
    assert (made.train_rows, made.eval_rows, made.not_read) == (1, 1, [*marks])


def test_words_in_a_column_with_the_name_of_a_mark_are_only_not_read(tmp_path: Path) -> None:
    rows = [{"text": "a", "weight": "70 kg", "mask": [0, 1], "train": "the Orient Express"}] * 2
    made = prepared(write(tmp_path / "rows.jsonl", rows))
    assert (made.remarks, made.not_read) == ({}, ["weight", "mask", "train"])


@pytest.mark.parametrize("name", ["loss_mask", "train_on_turn", "weight"])
def test_a_list_of_marks_beside_turns_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": CHAT, name: [0, 1]}] * 2)
    with pytest.raises(ConfigError, match=f"the column '{name}' is .0, 1., and the marks of turns"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]


@pytest.mark.parametrize(
    ("name", "value"), [("winner", "model_b"), ("preference", 1), ("betterResponse", "b")]
)
def test_a_column_with_the_better_of_two_answers_is_never_passed_over(
    tmp_path: Path, name: str, value: object
) -> None:
    row = {"question": "q", "response_a": "a", "response_b": "b", name: value}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    columns = {"question": "question", "answer": "response_a"}
    for options in ({}, {"columns": columns}):
        with pytest.raises(ConfigError, match=sentence("which of several answers is better", name)):
            prepared(path, **options)
    assert name in prepared(path, columns=columns, ignore=[name]).not_read
    # One answer alone has nothing to choose.
    path = write(tmp_path / "rows.jsonl", [{"question": "q", "answer": "a", name: value}] * 2)
    assert prepared(path).not_read == [name]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "q", "A": "x", "B": "y", "winner": "A"},
        {"prompt": "q", "a": "x", "b": "y", "preferred": "b"},
        {"question": "q", "A": "x", "B": "y", "answer": "x", "better": "A"},
        {"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": 1},
    ],
)
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_two_answers_and_the_better_one_are_neither_options_nor_a_pair(
    tmp_path: Path, columns: Row, method: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [columns] * 2)
    with pytest.raises(ConfigError, match=sentence("which of several answers is better")):
        prepared(path, method)


def test_options_that_are_the_two_answers_of_a_pair_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "q", "A": "x", "B": "y", "chosen": "x", "rejected": "y"}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(
        ConfigError, match=sentence("are the two answers themselves", "'A' and 'B'")
    ):
        prepared(path, "dpo")
    assert {read.source for read in lines(prepared(path, "dpo", ignore=["A", "B"]))} == {"q"}
    # Options of another question are asked.
    path = write(tmp_path / "more.jsonl", [{**row, "C": "z"}] * 2)
    assert {read.source for read in lines(prepared(path, "dpo"))} == {"q\nA. x\nB. y\nC. z"}


@pytest.mark.parametrize(
    ("name", "bad"), [("is_correct", False), ("correct", 0), ("accepted", "no"), ("flagged", True)]
)
@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_an_answer_that_is_marked_as_bad_is_not_learned_without_a_word(
    tmp_path: Path, name: str, bad: Any, end: str
) -> None:
    good = "yes" if bad == "no" else not bad
    row = {"question": "1+1?", "answer": "3"}
    path = write(tmp_path / f"rows.{end}", [{**row, name: good}, {**row, name: bad}])
    with pytest.raises(ConfigError, match=sentence("answers that are not good", "line", name)):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]
    # A row that a mark leaves out is not judged.
    rows = [{**row, name: good, "keep": 1}] * 2 + [{**row, name: bad, "keep": 0}]
    assert prepared(write(tmp_path / f"kept.{end}", rows)).not_read == [name]
    # Good answers alone are learned. A pair and a label have a judgement of their own.
    path = write(tmp_path / f"good.{end}", [{**row, name: good}] * 2)
    assert prepared(path).not_read == [name]
    for method in ("dpo", "kto"):
        path = write(tmp_path / f"{method}.{end}", [{**OF_METHODS[method], name: bad}] * 2)
        assert prepared(path, method).not_read == [name]


@pytest.mark.parametrize(
    ("name", "held"), [("split", "test"), ("data_split", "Val"), ("set", "dev")]
)
def test_rows_of_two_splits_are_not_all_learned(tmp_path: Path, name: str, held: str) -> None:
    rows = [{"text": str(n), name: split} for n, split in enumerate(["train", "train", held])]
    path = write(tmp_path / "rows.jsonl", rows)
    way = sentence("rows of one file are all for training", "line 3", name)
    with pytest.raises(ConfigError, match=way):
        prepared(path)
    with pytest.raises(ConfigError, match=way):
        prepared(path, columns={"text": "text"})
    assert prepared(path, ignore=[name]).not_read == [name]
    assert prepared(write(tmp_path / "all.jsonl", rows[:2])).not_read == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("keep", False), ("discard", 1), ("is_correct", 0), ("rejected", True)),
        *(("requires_loss", False), ("compute_loss_on_turn", 0), ("trainFlag", "no")),
        *(("turn_loss_mask", 0), ("mask_out", True), ("loss_ignore", 1), ("backprop", "False")),
    ],
)
def test_a_turn_that_a_mark_of_rows_speaks_against_is_not_learned(name: str, value: object) -> None:
    turns = [CHAT[0], {**CHAT[1], name: value}, *CHAT]
    with pytest.raises(ConfigError, match=f"messages.1..{name} is .*, and the turn would be"):
        row_from({"messages": turns}, "here")
    turns[1] = {**turns[1], "weight": 0}
    read = row_from({"messages": turns}, "here")
    assert [turn.get("weight") for turn in read.messages] == [None, 0, None, None]
    against = 1 if value in (0, "no", "False") else 0
    assert row_from({"messages": [*CHAT, CHAT[0], {**CHAT[1], name: against}]}, "here").messages


@pytest.mark.parametrize("beside", [{"label": 1}, {"label": "good"}, {"question": "Who?"}])
def test_a_text_with_another_part_is_not_learned_alone(tmp_path: Path, beside: Row) -> None:
    ((name, _),) = beside.items()
    path = write(tmp_path / "rows.jsonl", [{"text": "Ann", **beside}] * 2)
    with pytest.raises(ConfigError, match=f"{name} .*To learn the texts alone"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]
    path = write(tmp_path / "whole.jsonl", [{"text": "Who? Ann", "question": "Who?"}] * 2)
    assert prepared(path).not_read == ["question"]


def test_rows_that_are_all_marked_as_not_learned_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": "a", "train": False}] * 3)
    with pytest.raises(ConfigError, match=sentence("has a mark not to learn the row", "rows")):
        prepared(path)


@pytest.mark.slow
def test_a_mark_of_rows_in_a_table_is_read_beside_named_columns(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"a": str(number), "unread": 0, "train": number != 2} for number in range(4)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    made = prepared(tmp_path / "rows.parquet", columns={"text": "a"})
    assert sorted(row.target for row in lines(made)) == ["0", "1", "3"]


@pytest.mark.parametrize("key", ["messages", "conversations", "prompt"])
def test_a_key_of_a_turn_that_is_not_read_is_named_whatever_its_value(
    tmp_path: Path, key: str
) -> None:
    values: list[object] = [False, 0, "", [], {}, "x"]
    for value in values:
        row = {key: [CHAT[0], {**CHAT[1], "mood": value}]}
        if key == "prompt":
            row = {key: [{**CHAT[0], "mood": value}], "completion": CHAT[1:]}
        path = write(tmp_path / "rows.jsonl", [row] * 2)
        assert prepared(path).not_read == [f"{key}.mood"], value


def test_a_name_is_read_of_turns_of_tools_alone(tmp_path: Path) -> None:
    call = {"id": "1", "index": 0, "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {**CHAT[0], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "f"},
        CHAT[1],
    ]
    path = write(tmp_path / "rows.jsonl", [{"messages": turns}] * 2)
    assert prepared(path).not_read == ["messages.name", "messages.tool_calls.index"]


# Texts as they are written.


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.asks}-{form.answers}")
@pytest.mark.parametrize("end", ["jsonl", "json", "csv"])
def test_a_text_is_learned_as_it_is_written(tmp_path: Path, form: Any, end: str) -> None:
    rows = [{form.asks: f"  {n}\n", form.answers: SPACED} for n in range(2)]
    for read in lines(prepared(write(tmp_path / f"rows.{end}", rows))):
        assert read.target == SPACED
        assert (read.input if form.heading else read.source) in ("  0\n", "  1\n")


def test_plain_text_turns_templates_and_pairs_keep_their_white_space() -> None:
    assert row_from({"text": SPACED}, "here").target == SPACED
    turns = [CHAT[0], {"role": "assistant", "content": SPACED}]
    assert row_from({"messages": turns}, "here").messages[1]["content"] == SPACED
    read = method_of("dpo").rows
    row = read.read({"prompt": " a ", "chosen": SPACED, "rejected": SPACED.strip()}, "here")
    assert (row.source, row.target, rejected_of(row)["content"]) == (" a ", SPACED, SPACED.strip())
    assert not read.remark(row), "a difference in indentation is one"
    with pytest.raises(EmptyField):
        row_from({"text": " \n"}, "here")


def test_a_template_keeps_the_white_space_of_its_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", [{"a": " b ", "c": SPACED}] * 2)
    named = {"prompt": "<{a}>", "completion": "{c}"}
    assert {(row.source, row.target) for row in lines(prepared(path, columns=named))} == {
        ("< b >", SPACED)
    }


# Nulls.


def test_nulls_of_json_are_kept_and_those_of_tables_are_dropped() -> None:
    arguments = '{"x": null, "y": [1, null]}'
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    schema = {"name": "f", "parameters": {"properties": {"x": {"default": None}}}}
    turns = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        CHAT[1],
    ]
    tools = [{"type": "function", "function": schema}]
    for row in (
        {"messages": turns, "tools": tools},
        {"messages": turns, "tools": json.dumps(tools)},
        {"messages": json.dumps(turns), "tools": json.dumps(tools)},
    ):
        read = row_from(row, "here")
        (made,) = read.messages[1]["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": json.loads(arguments)}
        assert read.tools == tuple(tools)
        assert prepared_row(json.loads(read.to_json())) == read
    # A table has the arguments of every call in each call.
    call["function"] = {"name": "f", "arguments": {"x": 1, "of_another": None}}
    read = row_from(table_row({"messages": turns}, {}), "here")
    (made,) = read.messages[1]["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": {"x": 1}}


# Columns of the prompt.

HISTORY = [["first", "one"]]
ALPACA = {"instruction": "second", "input": "", "output": "two"}


@pytest.mark.parametrize("end", ["jsonl", "json", "csv"])
def test_a_system_text_and_a_history_are_turns_before_the_question(
    tmp_path: Path, end: str
) -> None:
    rows = [{**ALPACA, "system": "Be brief.", "history": HISTORY}] * 2
    made = prepared(write(tmp_path / f"rows.{end}", rows))
    assert made.not_read == []
    for row in lines(made):
        said = [(turn["role"], turn["content"], turn.get("weight", 1)) for turn in row.messages]
        assert said == [
            ("system", "Be brief.", 1),
            ("user", "first", 1),
            ("assistant", "one", 0),
            ("user", "second", 1),
            ("assistant", "two", 1),
        ]
    # Empty columns make no chat.
    plain = [{**ALPACA, "system": "", "history": []}] * 2
    path = write(tmp_path / f"plain.{end}", plain)
    assert all(not row.messages for row in lines(prepared(path)))


@pytest.mark.parametrize("key", ["system", "system_prompt"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": CHAT},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"question": "Hi", "answer": "Hello."},
    ],
)
def test_a_system_column_is_the_system_turn_of_any_form(key: str, row: Row) -> None:
    read = row_from({**row, key: "Be brief."}, "here")
    assert read.messages == ({"role": "system", "content": "Be brief."}, *CHAT)
    if "messages" in row:
        turns = [{"role": "system", "content": "Be brief."}, *CHAT]
        assert row_from({"messages": turns, key: "Be brief."}, "here") == read
        with pytest.raises(ConfigError, match=f"{key} is another text"):
            row_from({"messages": turns, key: "Be long."}, "here")


def test_the_older_functions_are_tools() -> None:
    turns = [
        CHAT[0],
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "2"},
        CHAT[1],
    ]
    schema = {"name": "f", "parameters": {"type": "object"}}
    read = row_from({"messages": turns, "functions": [schema]}, "here")
    assert read.tools == ({"type": "function", "function": schema},)
    assert read == row_from({"messages": turns, "tools": [schema]}, "here")


@pytest.mark.parametrize(
    ("choices", "answer", "learned"),
    [
        (["red", "blue"], 1, "B. blue"),
        (["red", "blue"], "1", "B. blue"),
        (["red", "blue"], "A", "A. red"),
        (["red", "blue"], "red", "A. red"),
        ({"text": ["red", "blue"], "label": ["1", "2"]}, "2", "2. blue"),
        ('["red", "blue"]', "0", "A. red"),
    ],
)
@pytest.mark.parametrize("key", ["choices", "options"])
def test_the_options_of_a_question_are_lettered(
    key: str, choices: object, answer: object, learned: str
) -> None:
    row = row_from({"question": "Which?", key: choices, "answer": answer}, "here")
    assert row.target == learned
    assert row.source.startswith("Which?\n") and "red" in row.source and "blue" in row.source


@pytest.mark.parametrize(
    ("choices", "answer"),
    [(["red", "blue"], 2), (["red", "blue"], "green"), (["0", "2", "1"], 1), ("red or blue", 0)],
)
def test_an_answer_that_fits_no_single_option_is_refused(choices: object, answer: object) -> None:
    with pytest.raises(ConfigError, match=r"here: (answer|choices) is "):
        row_from({"question": "Which?", "choices": choices, "answer": answer}, "here")


@pytest.mark.parametrize(
    ("answers", "judged", "is_clear"),
    [
        ([0, 1, 2], [1], True),
        (["1", "2"], ["0"], True),
        ([1, 2, 1], [2], False),
        (["B", "1"], ["A"], False),
        (["B", "red"], ["A"], True),
    ],
)
def test_positions_that_may_count_from_0_or_from_1_are_refused(
    tmp_path: Path, answers: Sequence[object], judged: Sequence[object], is_clear: bool
) -> None:
    paths = []
    for name, several in (("train", answers), ("eval", judged)):
        rows = [
            {"question": "Which?", "choices": ["red", "blue", "grey"], "answer": answer}
            for answer in several
        ]
        paths.append(write(tmp_path / f"{name}.jsonl", rows))
    train, evaluation = paths
    if is_clear:
        prepared(train, eval=str(evaluation), eval_share=None)
        return
    with pytest.raises(ConfigError, match=sentence("the positions may count from 0 or from 1")):
        prepared(train, eval=str(evaluation), eval_share=None)


FILLED: Mapping[str, object] = {
    **dict.fromkeys(PROMPT_KEYS, "x"),
    "history": HISTORY,
    **{name: [{"name": "f"}] for name in ("tools", "functions")},
    **{name: ["a", "b"] for name in ("choices", "options")},
}


@pytest.mark.parametrize("name", PROMPT_KEYS)
@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"messages": CHAT},
        {"question": "a", "answer": "b"},
        {"question": "a", "answer": "0"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {
            "table_id": "1",
            "question": "Who?",
            "sql": {"sel": "Name", "conds": [], "agg": ""},
        },
    ],
)
def test_a_column_of_the_prompt_is_never_only_listed(tmp_path: Path, row: Row, name: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{**row, name: FILLED[name]}] * 2)
    try:
        made = prepared(path)
    except ConfigError as error:
        assert f"'{name}'" in str(error) or f" {name}" in str(error) or "answer is" in str(error)
    else:
        assert name not in made.not_read
    # On purpose, the column is left out, and named.
    made = prepared(path, ignore=[name])
    assert made.not_read == [name]
    assert {read.source for read in lines(made)} == {row_from(row, "here").source}


def test_a_column_of_the_prompt_in_other_letters_or_beside_columns_is_refused(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "rows.csv", [{**ALPACA, "System": "Be brief."}] * 2)
    with pytest.raises(ConfigError, match="Did you mean 'system'"):
        prepared(path)
    path = write(tmp_path / "named.csv", [{"q": "a", "a": "b", "system": "Be brief."}] * 2)
    columns = {"question": "q", "answer": "a"}
    with pytest.raises(ConfigError, match="Add 'system': 'system' to columns"):
        prepared(path, columns=columns)
    made = prepared(path, columns={**columns, "system": "system"})
    assert all(row.messages[0]["role"] == "system" for row in lines(made))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.asks}-{form.answers}")
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("end", "text"), [("jsonl", " Ann came."), ("csv", " Ann came."), ("csv", "[]"), ("csv", "0")]
)
def test_the_context_of_a_question_is_read_in_every_form(
    tmp_path: Path, form: Any, given: str, end: str, text: str
) -> None:
    rows = [{form.asks: "Who?", form.answers: "Ann", given: text}] * 2
    made = prepared(write(tmp_path / f"rows.{end}", rows))
    if form.heading:
        # The text to summarize is the context of the heading.
        assert made.not_read == [given]
    else:
        assert made.not_read == []
        assert [(row.source, row.input) for row in lines(made)] == [("Who?", text)] * 2


def test_two_contexts_of_a_question_are_refused_with_the_way_out(tmp_path: Path) -> None:
    row = {"question": "Who?", "answer": "Ann", "input": "Ann came.", "context": "Bob went."}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match=sentence("is another text or list than", "input")):
        prepared(path)
    assert {read.input for read in lines(prepared(path, ignore=["context"]))} == {"Ann came."}
    assert row_from({**row, "context": row["input"]}, "here").input == "Ann came."


# Names by the last word: `key` is the field of the forms that the column belongs to.
BELONGING = {
    "context": [
        *("passage", "article", "paragraph", "background", "story", "document", "docs", "evidence"),
        *("retrieved_context", "sql context", "contexts", "sourceDocument", "db-schema"),
    ],
    "history": [
        *("chat_history", "conversation_history", "dialog history", "chathistory", "priorTurns"),
        *("past_messages", "previous_messages", "previous_turns", "context_messages"),
        *("past", "Prior", "previous", "past_user_inputs", "previous conversation", "earlierChat"),
    ],
    "system": [
        *("system_instruction", "sys_prompt", "sys", "System Text", "systemprompt", "preamble"),
        *("persona", "bot_persona", "developer", "developer_message", "developerPrompt"),
        *("instructions", "rules", "Guidelines", "memory", "memories"),
    ],
    "choices": ["answer_choices", "answerOptions", "endings"],
    "tools": [
        *("available_tools", "api functions", "tool_schemas", "function_definitions", "apiList"),
    ],
    "": ["chat_template_kwargs", "enable_thinking", "reasoning_effort"],
}
NAMES = [(key, name) for key, names in BELONGING.items() for name in names]


@pytest.mark.parametrize(("number", "key", "name"), [(n, *each) for n, each in enumerate(NAMES)])
@pytest.mark.parametrize("of_pair", [False, True])
def test_a_column_of_the_prompt_under_another_name_is_refused_with_the_key(
    tmp_path: Path, number: int, key: str, name: str, of_pair: bool
) -> None:
    others = [form for form in FORMS if not form.heading]
    form = others[number % len(others)]
    row = {form.asks: "Who?", form.answers: "Ann"}
    method = "sft"
    if of_pair:
        row = {form.asks: "Who?", "chosen": "Ann", "rejected": "Bob"}
        method = "dpo"
    path = write(tmp_path / "rows.jsonl", [{**row, name: "Ann came."}] * 2)
    with pytest.raises(ConfigError, match=f"the column '{name}' belongs to the prompt") as refused:
        prepared(path, method)
    assert not key or f"'{key}'" in str(refused.value)
    made = prepared(path, method, ignore=[name])
    assert made.not_read == [name]
    # Empty columns say nothing, and numbers are no text of a prompt.
    nothing: list[Any] = ["", [], *([3, True] if key else [])]
    for said in nothing:
        path = write(tmp_path / "empty.jsonl", [{**row, name: said}] * 2)
        assert prepared(path, method).not_read == [name]


@pytest.mark.parametrize(
    "name",
    [
        *("context_length", "system_id", "document_title", "turn_count", "choice", "prompt_id"),
        *("tool_count", "persona_id", "list", "developer_id", "previous_id", "conversation"),
        *("violated_rules", "memory_gib"),
    ],
)
def test_a_name_whose_last_word_is_no_part_of_a_prompt_is_only_not_read(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "Who?", "answer": "Ann", name: "a"}] * 2)
    assert prepared(path).not_read == [name]


@pytest.mark.parametrize(
    ("end", "name", "value"),
    [
        ("jsonl", "context", "c"),
        ("jsonl", "input", "c"),
        ("jsonl", "sql_context", "c"),
        ("jsonl", "option_a", "Ann"),
        # What is read of a table depends on the columns that are named.
        pytest.param("parquet", "sql_context", "c", marks=pytest.mark.slow),
        pytest.param("parquet", "option_a", "Ann", marks=pytest.mark.slow),
    ],
)
def test_a_column_of_the_prompt_beside_named_columns_is_refused_in_every_format(
    tmp_path: Path, end: str, name: str, value: str
) -> None:
    row: dict[str, Any] = {"q": "Who?", "a": "Ann"}
    row |= {name: value, "option_b": "Bob" if "op" in name else None}
    path = tmp_path / f"rows.{end}"
    if end == "parquet":
        from datasets import Dataset

        Dataset.from_list([row] * 2).to_parquet(path)
    else:
        write(path, [row] * 2)
    columns = {"question": "q", "answer": "a"}
    with pytest.raises(ConfigError, match=f"the column '{name}' belongs to the prompt"):
        prepared(path, columns=columns)
    ignored = [each for each in (name, "option_b") if row[each]]
    assert set(prepared(path, columns=columns, ignore=ignored).not_read) == {name, "option_b"}


@pytest.mark.parametrize(
    "exchanges",
    [
        [["Who came?", "Bob."]],
        [{"user": "Who came?", "assistant": "Bob."}],
        [{"human": "Hi!", "gpt": "Hello."}, {"human": "Who came?", "gpt": "Bob."}],
    ],
)
@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_exchanges_beside_a_question_are_refused_under_every_name(
    tmp_path: Path, end: str, exchanges: list[Any]
) -> None:
    row = {"question": "Who?", "answer": "Ann", "log": exchanges}
    path = write(tmp_path / f"rows.{end}", [row] * 2)
    with pytest.raises(ConfigError, match=r"the column 'log' belongs to the prompt.*'history'"):
        prepared(path)
    assert prepared(path, ignore=["log"]).not_read == ["log"]


@pytest.mark.parametrize(
    "value", [[["Paris", "city"]], [["Who came?"]], [[1, 2]], [{"model": "a"}]]
)
def test_lists_of_other_things_beside_a_question_are_only_not_read(
    tmp_path: Path, value: list[Any]
) -> None:
    row = {"question": "Who?", "answer": "Ann", "log": value}
    assert prepared(write(tmp_path / "rows.jsonl", [row] * 2)).not_read == ["log"]


@pytest.mark.parametrize("name", ["thread", "conversation", "dialogue", "x"])
def test_turns_beside_a_question_are_refused_under_every_name(tmp_path: Path, name: str) -> None:
    row: dict[str, Any] = {"question": "Who?", "answer": "Ann", name: CHAT}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match=f"the column '{name}' holds turns of a chat"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]
    asked = {"question": "question", "answer": "answer"}
    assert prepared(path, columns=asked).not_read == [name]
    read = lines(prepared(path, columns={"messages": name}))
    assert [len(row.messages) for row in read] == [2, 2]


@pytest.mark.parametrize("name", ["prompt", "instruction", "question", "query", "problem"])
def test_a_question_beside_a_chat_is_only_not_read_if_the_turns_have_it(
    tmp_path: Path, name: str
) -> None:
    asked = {"role": "user", "content": "Say who came."}
    row = {"messages": [asked, CHAT[1]], name: "Say who came."}
    assert prepared(write(tmp_path / "same.jsonl", [row] * 2)).not_read == [name]
    path = write(tmp_path / "other.jsonl", [row, {**row, name: "Answer as a pirate."}])
    with pytest.raises(ConfigError, match=rf"line 2: the column '{name}' .* into a turn"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]


@pytest.mark.parametrize("marks", [[0, 1], [False, False, False, True], [1.0, 0.0]])
def test_marks_of_turns_in_a_list_are_refused_under_every_name(
    tmp_path: Path, marks: list[Any]
) -> None:
    row = {"messages": [*CHAT, *CHAT], "flags": marks}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match=r"the column 'flags' is .*, and the marks of turns"):
        prepared(path)
    assert prepared(path, ignore=["flags"]).not_read == ["flags"]
    for other in ([0, 0], [0, 1, 0], [0, 5], ["0", "1"]):
        path = write(tmp_path / "other.jsonl", [{**row, "flags": other}] * 2)
        assert prepared(path).not_read == ["flags"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", ".parquet"])
def test_numbers_of_classes_are_learned_as_the_names_of_the_classes(
    tmp_path: Path, end: str
) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"question": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    rows = {"question": ["a?", "b?", "c?"], "answer": [1, 0, -1]}
    table = Dataset.from_dict(rows, features=features)
    path = tmp_path / f"rows{end}"
    if end:
        table.to_parquet(path)
    else:
        table.save_to_disk(path)
    made = prepared(path)
    assert sorted(row.target for row in lines(made)) == ["", "no", "yes"]
    assert made.empty_answers == 1
    if end:  # as the pods read a hub dataset
        (tmp_path / "hub").mkdir()
        table.to_parquet(tmp_path / "hub" / "train.parquet")
        hub = {"kind": "hub", "name": str(tmp_path / "hub"), "eval_share": 0.5}
        loaded = load(None, None, hub, method_of("sft").rows)
        assert sorted(row.target for row in (*loaded.train, *loaded.eval)) == ["", "no", "yes"]


CONTEXTS: Mapping[str, Any] = {
    "passage": "Ann came.",
    "context": "Ann came.",
    "documents": [{"title": "On Ann", "text": "Ann came."}],
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_context_of_a_chat_is_only_not_read_if_the_turns_have_it(
    tmp_path: Path, name: str
) -> None:
    asked = {"role": "user", "content": "On Ann: Ann came. Who?"}
    row = {"messages": [asked, CHAT[1]], name: CONTEXTS[name]}
    for end in ("jsonl", "csv"):
        assert prepared(write(tmp_path / f"rows.{end}", [row] * 2)).not_read == [name]
    path = write(tmp_path / "apart.jsonl", [row, {**row, "messages": CHAT}])
    with pytest.raises(ConfigError, match=f"line 2: the column '{name}' belongs to the prompt"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]
    # Plain text has everything in itself.
    path = write(tmp_path / "text.jsonl", [{"text": "b", name: CONTEXTS[name]}] * 2)
    assert prepared(path).not_read == [name]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "Complex_CoT"])
@pytest.mark.parametrize("row", [{"messages": CHAT}, ALPACA, {"question": "a", "answer": "b"}])
def test_thoughts_beside_an_answer_are_never_only_listed(
    tmp_path: Path, name: str, row: Row
) -> None:
    path = write(tmp_path / "rows.jsonl", [{**row, name: "Let us see."}] * 2)
    with pytest.raises(ConfigError, match=f"the column '{name}' belongs to the answer"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]
    if "answer" in row:
        columns = {"question": "question", "answer": f"<think>{{{name}}}</think>{{answer}}"}
        read = lines(prepared(path, columns=columns))
        assert {each.target for each in read} == {"<think>Let us see.</think>b"}
        row = {**row, "answer": "<think>Let us see.</think>b"}
        path = write(tmp_path / "whole.jsonl", [{**row, name: "Let us see."}] * 2)
        assert prepared(path).not_read == [name]
    # The judge of a pair may have thoughts of its own.
    path = write(tmp_path / "pair.jsonl", [{**OF_METHODS["dpo"], name: "Let us see."}] * 2)
    assert prepared(path, "dpo").not_read == [name]


OPTION_NAMES = ["{}", "option_{}", "Option {}", "choice{}", "op{}", "opt-{}"]


@pytest.mark.parametrize("end", ["jsonl", "csv"])
@pytest.mark.parametrize("name", OPTION_NAMES)
@pytest.mark.parametrize(("answer", "learned"), [("B", "B. 4"), ("4", "B. 4"), (0, "A. 3")])
def test_options_in_columns_of_their_own_are_lettered(
    tmp_path: Path, end: str, name: str, answer: object, learned: str
) -> None:
    columns = {
        name.format(mark): text for mark, text in zip("ABCD", ["3", "4", "5", ""], strict=True)
    }
    row = {"question": "2+2?", **columns, "answer": answer}
    made = prepared(write(tmp_path / f"rows.{end}", [row] * 2))
    assert made.not_read == []
    assert {read.source for read in lines(made)} == {"2+2?\nA. 3\nB. 4\nC. 5"}
    assert {read.target for read in lines(made)} == {learned}
    ignored = [*columns]
    plain = prepared(tmp_path / f"rows.{end}", ignore=ignored)
    assert {read.source for read in lines(plain)} == {"2+2?"}
    # Columns that the options are not named among are refused, until a template reads them.
    named = {"question": "question", "answer": "answer"}
    with pytest.raises(ConfigError, match="into the template of the question"):
        prepared(tmp_path / f"rows.{end}", columns=named)
    if answer == "B" and end == "jsonl":
        template = "{question} " + " ".join(f"{{{column}}}" for column in columns)
        read = prepared(tmp_path / f"rows.{end}", columns={**named, "question": template})
        assert {row.source for row in lines(read)} == {"2+2? 3 4 5 "}


def test_columns_of_one_letter_or_of_small_letters_are_no_options(tmp_path: Path) -> None:
    row = {"question": "2+2?", "A": "x", "a": "y", "b": "z", "answer": "4"}
    made = prepared(write(tmp_path / "rows.jsonl", [row] * 2))
    assert made.not_read == ["A", "a", "b"]


@pytest.mark.parametrize("name", ["conversation", "chat", "turns"])
def test_a_column_of_turns_is_named_as_the_messages(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"id": "1", "note": "a", name: CHAT}] * 2)
    with pytest.raises(ConfigError, match=rf"'columns': \{{'messages': '{name}'\}}"):
        prepared(path)
    made = prepared(path, columns={"messages": name})
    assert [row.messages for row in lines(made)] == [tuple(CHAT)] * 2


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (
            {"id": "1", "context": "c", "question": "q", "answers": {"text": ["a", "b"]}},
            {"question": "question", "answer": "answers.text", "context": "context"},
        ),
        ({"translation": {"en": "a", "fr": "b"}}, "translation.en"),
        ({"stem": "q", "choices": ["a", "b"], "answerKey": "A"}, {"choices": "choices"}),
        ({"goal": "q", "sol1": "a", "sol2": "b", "note": "c"}, {"target": "note"}),
        ({"prompt": "q", "A": "x", "B": "y", "label": "A"}, {"completion": "label"}),
        ({"question": "q", "query": "SELECT 1"}, {"question": "question", "answer": "query"}),
        ({"dialog": ["a", "b"]}, "Write every text as a turn of a list 'messages'"),
        ({"turns": ["a", "b"], "id": 7}, "Write every text as a turn of a list 'messages'"),
        ({"title": "t", "qas": [{"question": "q"}]}, "'qas' is a list of objects"),
        ({"role": "user", "content": "q"}, "is of a single turn"),
        ({"role": "user", "text": "q"}, "is of a single turn"),
        ({"question": "q", "a": "x", "b": "y", "answer": "b"}, "options 'A', 'B'"),
        ({"question": "q", "answer": True}, "Write the word"),
        ({"question": "q", "answer": {"value": "b"}}, "as in 'answer.value'"),
        ({"question": "q", "answer": ["a", "b"]}, "name a list of answers in the option columns"),
    ],
)
def test_a_row_of_another_form_gets_advice_that_fits(
    tmp_path: Path, row: Row, columns: Mapping[str, str] | str
) -> None:
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError) as refused:
        prepared(path)
    named = columns if isinstance(columns, str) else str(columns)[1:-1]
    assert named in str(refused.value)


def test_advice_for_a_pair_names_no_column_that_does_not_fit(tmp_path: Path) -> None:
    row = {"instruction": "q", "completions": [{"response": "a"}], "models": ["a"]}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match="'chosen': '…', 'rejected': '…'"):
        prepared(path, "dpo")


@pytest.mark.parametrize("field", ["context", "question", "{} so"])
@pytest.mark.parametrize("several", [["a", "b"], [{"t": "a"}, {"t": "b"}]])
def test_a_list_of_several_texts_is_no_question(
    tmp_path: Path, field: str, several: list[Any]
) -> None:
    row = {"q": "q", "a": "a", "list": several}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    named = "list" if isinstance(several[0], str) else "list.t"
    columns = {"question": "q", "answer": "a", field: named}
    if "{" in field:
        columns = {"question": field.format(f"{{{named}}}"), "answer": "a"}
    with pytest.raises(ConfigError, match=sentence("only the first one would be read", "list")):
        prepared(path, columns=columns)
    # A list of answers has a first one.
    columns = {"question": "q", "answer": named}
    assert {read.target for read in lines(prepared(path, columns=columns))} == {"a"}


def test_lists_of_the_prompt_are_read_whole_beside_named_columns(tmp_path: Path) -> None:
    row = {"q": "q", "list": ["x", "y"], "a": "B"}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    made = prepared(path, columns={"question": "q", "answer": "a", "choices": "list"})
    assert {(read.source, read.target) for read in lines(made)} == {("q\nA. x\nB. y", "B. y")}


def test_words_of_tables_for_an_empty_cell_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "nan" if n == 0 else "a"} for n in range(4)]
    [(remark, count)] = prepared(write(tmp_path / "rows.csv", rows)).remarks.items()
    assert "'nan'" in remark and count == 1
    rows = [{"question": "q", "answer": "NaN"}] * 3
    with pytest.raises(ConfigError, match=r"of .* rows have a question or an answer 'nan'"):
        prepared(write(tmp_path / "all.csv", rows))


TWO_QUESTIONS: Mapping[str, Row] = {
    "sft": {"instruction": "Add.", "question": "1+1?", "answer": "2"},
    "dpo": {"instruction": "Add.", "question": "1+1?", "chosen": "2", "rejected": "3"},
    "grpo": {"instruction": "Add.", "question": "1+1?", "result": 2},
}


@pytest.mark.parametrize("method", TWO_QUESTIONS)
def test_of_two_questions_none_is_left_out_without_a_word(tmp_path: Path, method: str) -> None:
    row = TWO_QUESTIONS[method]
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match=r"'ignore': .'(question|instruction)'"):
        prepared(path, method)
    made = prepared(path, method, ignore=["instruction"])
    assert {read.source for read in lines(made)} == {"1+1?"}
    # A question that the other one contains is asked.
    path = write(tmp_path / "whole.jsonl", [{**row, "instruction": "Add. 1+1?"}] * 2)
    assert prepared(path, method).train_rows == 1


SOURCES: Mapping[str, Row] = {
    "dpo": {
        "chosen": "\n\nHuman: 1+1?\n\nAssistant: 2",
        "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3",
    },
    "reward": {"task": "Add 1 and 1.", "chosen": "2", "rejected": "3"},
    "grpo": {"task": "Add 1 and 1.", "answer": "2"},
}


@pytest.mark.parametrize("method", SOURCES)
def test_where_a_row_is_from_is_no_prompt(tmp_path: Path, method: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"source": "web", **SOURCES[method]}] * 2)
    with pytest.raises(ConfigError, match=r"line 1: source .*'ignore'"):
        prepared(path, method)
    chats: Row = {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "No."}]}
    path = write(tmp_path / "chats.jsonl", [{"source": "web", **chats}] * 2)
    if method != "grpo":
        assert {read.source for read in lines(prepared(path, method))} == {"Hi"}


def test_the_input_alone_is_the_prompt_of_a_pair(tmp_path: Path) -> None:
    row = {"system": "s", "input": "q", "chosen": "x", "rejected": "y"}
    made = prepared(write(tmp_path / "rows.jsonl", [row] * 2), "dpo")
    assert {(read.source, read.target) for read in lines(made)} == {("q", "x")}
    assert made.not_read == []


# Empty questions.


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.asks}-{form.answers}")
@pytest.mark.parametrize(
    ("end", "empty"), [("jsonl", ""), ("jsonl", "  "), ("jsonl", None), ("json", None), ("csv", "")]
)
def test_an_empty_question_is_one_in_every_form_and_format(
    tmp_path: Path, form: Any, end: str, empty: str | None
) -> None:
    whole = {form.asks: "a", form.answers: "b", "text": "a b"}
    path = write(tmp_path / f"rows.{end}", [whole, whole, {**whole, form.asks: empty}, whole])
    place = "line 4" if end == "csv" else "line [13]"
    with pytest.raises(
        ConfigError, match=rf"rows\.{end}, {place}: {form.asks} is empty.*drop_empty"
    ):
        prepared(path)
    made = prepared(path, drop_empty=True)
    assert made.train_rows + made.eval_rows == 3
    assert list(made.remarks.values()) == [1]
    assert made.not_read == ["text"]


def test_rows_that_lack_a_key_of_the_file_lack_its_value(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b"}, {"answer": "b", "text": "a b"}] * 3
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match="line 2: question is empty; 3 of 6 rows have"):
        prepared(path)
    # A mixture of forms is no row with an empty question.
    rows = [{"question": "a", "answer": "b"}, {"text": "c"}, {"messages": CHAT}] * 2
    read = lines(prepared(write(tmp_path / "mixed.jsonl", rows)))
    assert sorted(row.target for row in read) == sorted(["b", "c", "Hello."] * 2)


def test_rows_with_empty_answers_are_dropped_where_asked_to(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "" if n < 2 else "b"} for n in range(6)]
    path = write(tmp_path / "rows.csv", rows)
    assert prepared(path).empty_answers == 2
    made = prepared(path, drop_empty=True)
    assert (made.train_rows + made.eval_rows, made.empty_answers) == (4, 0)
    assert list(made.remarks.values()) == [2]


@pytest.mark.parametrize(
    ("after", "counted"),
    [
        ([], {}),
        ([{"role": "user", "content": "And then?"}], {"turns after the last learned answer": 1}),
        (
            [
                {"role": "user", "content": "And then?"},
                {"role": "assistant", "content": "No.", "weight": 0},
            ],
            {"turns after the last learned answer": 1},
        ),
    ],
    ids=["none", "question", "answer that is not learned"],
)
def test_turns_after_the_last_learned_answer_are_counted(
    tmp_path: Path, after: list[Row], counted: Mapping[str, int]
) -> None:
    rows = [{"messages": CHAT}, {"messages": [*CHAT, *after]}] + [{"messages": CHAT}] * 2
    made = prepared(write(tmp_path / "rows.jsonl", rows))
    said = {remark.partition(",")[0]: count for remark, count in made.remarks.items()}
    assert said == counted
    assert {row.target for row in lines(made)} == {"Hello."}


# Pairs.

TURNS = {"chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "No."}]}
QUESTION = {"instruction": "Say", "input": "Hi"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": [*CHAT], "rejected": [CHAT[0], *TURNS["rejected"]]},
        {"prompt": "Hi", **TURNS},
        {"prompt": CHAT[:1], "chosen": [*CHAT], "rejected": [CHAT[0], *TURNS["rejected"]]},
        {"prompt": CHAT[:1], "chosen": "Hello.", "rejected": "No."},
        {"messages": CHAT[:1], **TURNS},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        {"messages": CHAT, "rejected_response": "No."},
        {"messages": CHAT, "rejected_messages": [CHAT[0], {"role": "assistant", "content": "No."}]},
        {"conversations": CHAT, "rejected_response": {"from": "gpt", "value": "No."}},
        {
            "input": {"messages": CHAT[:1], "tools": [], "parallel_tool_calls": True},
            "preferred_output": TURNS["chosen"],
            "non_preferred_output": TURNS["rejected"],
        },
    ],
)
@pytest.mark.parametrize("end", ["jsonl", "csv"])
def test_every_published_form_of_a_pair_of_chats_is_one_row(
    tmp_path: Path, row: Row, end: str
) -> None:
    expected = method_of("dpo").rows.read({"prompt": CHAT[:1], **TURNS}, "here")
    made = prepared(write(tmp_path / f"rows.{end}", [row] * 2), "dpo")
    assert lines(made) == [expected] * 2
    within = ["input.parallel_tool_calls"] if "input" in row else []
    assert made.not_read == within


@pytest.mark.parametrize("as_text", [False, True])
def test_an_object_with_the_turns_of_a_pair_is_refused_with_the_path(
    tmp_path: Path, as_text: bool
) -> None:
    # As in kakao's data of diatool: JSON text of an object with turns and functions.
    row: dict[str, Any] = {}
    for key, turns in TURNS.items():
        row[key] = {"messages": [CHAT[0], *turns], "tools": [FUNCTION]}
        row[key] = json.dumps(row[key]) if as_text else row[key]
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match=r"columns=\{'chosen': 'chosen.messages', …\}"):
        prepared(path, "dpo")
    columns = {"chosen": "chosen.messages", "rejected": "rejected.messages"}
    expected = method_of("dpo").rows.read({"prompt": CHAT[:1], **TURNS}, "here")
    assert lines(prepared(path, "dpo", columns=columns)) == [expected] * 2


def test_both_answers_of_a_pair_keep_their_thoughts() -> None:
    chosen, rejected = ({**TURNS[key][0], "reasoning_content": key} for key in TURNS)
    row = {"prompt": CHAT[:1], "chosen": [chosen], "rejected": [rejected]}
    read = method_of("dpo").rows.read(row, "here")
    other = with_rejected(prepared_row(json.loads(read.to_json())))
    assert (read.messages[-1], other.messages[-1]) == (chosen, rejected)


@pytest.mark.parametrize("name", [rejected for _, rejected in PAIRS])
def test_answers_to_avoid_are_refused_where_answers_are_learned(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": CHAT, name: "No."}] * 2)
    with pytest.raises(ConfigError, match=f"the column '{name}' holds answers to avoid"):
        prepared(path)
    assert prepared(path, ignore=[name]).not_read == [name]


@pytest.mark.parametrize("margin", [0.5, 0, "0.5"])
def test_a_margin_of_a_pair_is_refused_where_trl_learns_it(tmp_path: Path, margin: object) -> None:
    row = {"prompt": "Hi", "chosen": "Hello.", "rejected": "No.", "margin": margin}
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    with pytest.raises(ConfigError, match="line 1: margin is "):
        prepared(path, "reward")
    assert prepared(path, "reward", ignore=["margin"]).not_read == ["margin"]
    assert prepared(path, "dpo").not_read == ["margin"]


OPENAI = {"preferred_output": TURNS["chosen"], "non_preferred_output": TURNS["rejected"]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("end", ["jsonl", "csv"])
@pytest.mark.parametrize("key", ["tools", "functions", "system"])
def test_the_keys_beside_the_turns_of_a_pair_are_read(tmp_path: Path, key: str, end: str) -> None:
    value: Any = "Be brief." if key == "system" else [FUNCTION["function"]]
    if key == "tools":
        value = [FUNCTION]
    expected = method_of("dpo").rows.read({"prompt": CHAT[:1], **TURNS, key: value}, "here")
    assert expected.tools or expected.messages[0]["role"] == "system"
    row = {"input": {"messages": CHAT[:1], key: value}, **OPENAI}
    made = prepared(write(tmp_path / f"rows.{end}", [row] * 2), "dpo")
    assert (lines(made), made.not_read) == ([expected] * 2, [])


@pytest.mark.parametrize("value", [True, False, 0, "", [], {}, "x"])
def test_other_keys_beside_the_turns_of_a_pair_are_named(tmp_path: Path, value: object) -> None:
    turn = {**CHAT[0], "mood": value}
    row = {"input": {"messages": [turn], "parallel_tool_calls": value, "null": None}, **OPENAI}
    made = prepared(write(tmp_path / "rows.jsonl", [row] * 2), "dpo")
    assert made.not_read == ["input.parallel_tool_calls", "input.messages.mood"]


@pytest.mark.parametrize(
    ("within", "beside"),
    [
        ({"tools": [FUNCTION]}, {"tools": [{**FUNCTION, "function": {"name": "g"}}]}),
        ({"system": "Be brief."}, {"system": "Be kind."}),
        ({"history": [["a", "b"]]}, {}),
        ({"choices": ["a", "b"]}, {}),
    ],
)
def test_keys_of_the_prompt_beside_the_turns_of_a_pair_are_never_lost(
    within: Row, beside: Row
) -> None:
    row = {"input": {"messages": CHAT[:1], **within}, **OPENAI, **beside}
    with pytest.raises(ConfigError, match=rf"here: input\.{next(iter(within))} (is|belongs) "):
        method_of("dpo").rows.read(row, "here")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.asks}-{form.answers}")
@pytest.mark.parametrize(("end", "given"), [("jsonl", "input"), ("csv", "context")])
def test_every_form_of_a_question_stands_beside_a_pair(
    tmp_path: Path, form: Any, end: str, given: str
) -> None:
    row = {form.asks: "Hi", "chosen": "Hello.", "rejected": "No."}
    if not form.heading:
        row[given] = "Ann"
    made = prepared(write(tmp_path / f"rows.{end}", [row] * 2), "dpo")
    for read in lines(made):
        assert "Hi" in f"{read.source} {read.input}"
        assert ("Ann" in read.input) == (not form.heading)
        assert (read.target, rejected_of(read)["content"]) == ("Hello.", "No.")
    assert made.not_read == []
    with pytest.raises(ConfigError, match=f"{form.asks} is empty|have no prompt"):
        prepared(write(tmp_path / f"empty.{end}", [{**row, form.asks: ""}] * 2), "dpo")


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_column_of_where_a_row_is_from_is_no_question(tmp_path: Path, method: str) -> None:
    # As in HuggingFaceH4/ultrafeedback_binarized.
    answers = {"chosen": [*CHAT], "rejected": [CHAT[0], *TURNS["rejected"]]}
    row = {"prompt": "Hi", **answers, "messages": CHAT, "score_chosen": 8.0, "source": "web"}
    made = prepared(write(tmp_path / "rows.jsonl", [row] * 2), method)
    assert {read.source for read in lines(made)} == {"Hi"}
    if method == "dpo":
        assert made.not_read == ["messages", "score_chosen", "source"]
        plain = {"source": "web", "question": "Hi", "chosen": "a", "rejected": "b"}
        assert method_of("dpo").rows.read(plain, "here").source == "Hi"


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo"])
def test_a_system_column_is_read_by_every_method(method: str) -> None:
    answers = {"chosen": "Hello.", "rejected": "No.", "answer": "Hello.", "label": True}
    if method == "dpo":
        del answers["answer"]
    row = {"system": "Be brief.", "question": "Hi", **answers}
    read = method_of(method).rows.read(row, "here")
    assert [turn["role"] for turn in read.messages][:2] == ["system", "user"]


def test_the_input_of_an_instruction_is_asked_by_grpo() -> None:
    read = method_of("grpo").rows.read({**QUESTION, "output": "Hello."}, "here")
    assert (read.source, read.input) == ("Say", "Hi")


# Messages.


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "Prompt,Completion\na,b\n", "Did you mean 'prompt' for 'Prompt' and"),
        ("a.csv", "prompt , completion\na,b\n", "'prompt': 'prompt ', 'completion': ' completion'"),
        (
            "a.csv",
            "id,body\n1,b\n",
            r"dataset=\{'kind': 'files', 'train': '.*a.csv', .*'columns': \{'source': '…', .*\}$",
        ),
        ("a.json", '{"prompt": {"0": "a"}, "completion": {"0": "b"}}', "orient='records'"),
        ("a.json", '{"prompt": ["a", "b"], "completion": ["c", "d"]}', "Dataset.to_dict"),
        ("a.jsonl", '[{"prompt": "a", "completion": "b"}]', "suffix .json"),
        ("a.jsonl", '[\n{"prompt": "a", "completion": "b"}\n]', "suffix .json"),
        ("a.jsonl", '{\n "prompt": "a", "completion": "b"\n}', "suffix .json"),
        ("a.jsonl", '{"prompt": "a", "completion": "b",}\n', "no comma before a closing bracket"),
        ("a.jsonl", '{"prompt": "a", "completion": "b"},\n', "the comma at the end of the line"),
        ("a.csv", "messages\n\"[{'role': 'user', 'content': 'a'}]\"\n", "pandas' to_csv writes"),
        ("a.csv", "prompt,completion\n\"[{'role': 'user'}]\",b\n", "pandas' to_csv writes"),
    ],
)
def test_a_file_in_another_form_names_the_way_out(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        prepared(path)


def test_a_question_after_a_tool_s_turn_names_the_way_out() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    turns = [CHAT[0], {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "2"}, *CHAT]
    with pytest.raises(
        ConfigError,
        match=sentence("Write the assistant's answer to the tool before the turn", "messages[3]"),
    ):
        row_from({"messages": turns}, "here")


# Tables.


@pytest.mark.slow
def test_rows_of_a_table_are_the_rows_of_a_json_file(tmp_path: Path) -> None:
    from datasets import Dataset

    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": " Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "f"},
        {"role": "assistant", "content": "bad", "loss": False},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "content": SPACED},
    ]
    rows: list[dict[str, Any]] = [
        {**ALPACA, "system": "Be brief.", "history": HISTORY},
        {"question": "Which?", "choices": ["red", "blue"], "answer": "0"},
        {"messages": turns, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"text": SPACED},
        {"question": "", "answer": "x", "text": "an empty question"},
        {"prompt": json.dumps(CHAT[:1]), "completion": json.dumps(CHAT[1:])},
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    Dataset.from_list([{**dict.fromkeys(names), **row} for row in rows]).to_parquet(
        tmp_path / "rows.parquet"
    )
    write(tmp_path / "rows.jsonl", rows)
    made = [
        prepared(tmp_path / f"rows.{end}", drop_empty=True, seed=1) for end in ("parquet", "jsonl")
    ]
    table, text = made
    assert lines(table) == lines(text)
    assert table.remarks == text.remarks != {}
    assert list(table.not_read) == list(text.not_read)


# Folders.


@pytest.mark.parametrize("name", ["eval", "evaluation", "dev", "validation", "valid", "val"])
def test_a_folder_s_rows_to_evaluate_on_have_every_usual_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "train.jsonl", [ALPACA] * 4)
    write(tmp_path / f"{name}.jsonl", [ALPACA] * 3)
    made = prepare(dataset_from(str(tmp_path)), tmp_path / "out")
    assert (made.train_rows, made.eval_rows, list(made.not_read)) == (4, 3, [])


def test_files_of_rows_that_a_folder_does_not_use_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "test").mkdir(parents=True)
    (folder / "lost+found").mkdir(mode=0)
    for name in ("train.jsonl", "train.csv", "eval.jsonl", "val.jsonl", "more.json", "test/a.csv"):
        write(folder / name, [{"text": "a", "id": 1}] * 3)
    for name in ("README.md", "other.xlsx", "rows.jsonl.zip"):
        (folder / name).write_text("Rows.")
    made = prepare(dataset_from(str(folder)), tmp_path / "out")
    assert (made.train_rows, made.eval_rows) == (3, 3)
    unread = ["more.json", "other.xlsx", "rows.jsonl.zip", "test/", "train.csv", "val.jsonl"]
    assert list(made.not_read) == ["id", *(f"file {name}" for name in unread)]


def test_a_clone_of_a_hub_dataset_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        write(tmp_path / "data" / f"train-0000{number}-of-00002.jsonl", [ALPACA] * 2)
    write(tmp_path / "data" / "validation-00000-of-00001.jsonl", [ALPACA])
    write(tmp_path / "data" / "test-00000-of-00001.jsonl", [ALPACA])
    made = prepare(dataset_from(str(tmp_path)), tmp_path / "out")
    assert (made.train_rows, made.eval_rows) == (4, 1)
    assert made.not_read == ["file test-00000-of-00001.jsonl"]


def test_folders_of_the_usual_names_hold_the_parts_of_a_dataset(tmp_path: Path) -> None:
    for name in ("train/a.jsonl", "train/b.jsonl", "val/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [ALPACA] * 2)
    made = prepare(dataset_from(str(tmp_path)), tmp_path / "out")
    assert (made.train_rows, made.eval_rows, list(made.not_read)) == (4, 2, [])


def test_a_folder_without_training_rows_names_what_it_has(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [ALPACA])
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "train.jsonl", [ALPACA])
    with pytest.raises(
        ConfigError,
        match=sentence("the folder has no train file", "rows.jsonl, more/"),
    ):
        dataset_from(str(tmp_path))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("https://huggingface.co/datasets/me/rows", "'kind': 'hub', 'name': 'me/rows'"),
        ("https://huggingface.co/datasets/me/rows/tree/main", "'name': 'me/rows'"),
        ("https://huggingface.co/datasets/squad", "'name': 'squad'"),
        ("https://huggingface.co/datasets/squad/viewer/plain_text", "'name': 'squad'"),
        ({"kind": "files", "train": "https://hf.co/datasets/me/rows"}, "'name': 'me/rows'"),
        ("me/rows", "'kind': 'hub', 'name': 'me/rows'"),
    ],
)
def test_a_dataset_of_the_hub_is_named_as_one(dataset: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset_from(dataset)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), "compressed by gzip"),
        ("rows.csv", b"PK\x03\x04 a spreadsheet", "zip archive or a spreadsheet"),
        ("rows.json", b"PAR1 a table", "is a Parquet file"),
        ("rows.jsonl", '{"text": "a"}'.encode("utf-16-le"), "encoding='utf-16-le'"),
        ("rows.ipynb", b"{}", "is a notebook"),
        ("rows.pdf", b"%PDF-1.7", "is a document"),
    ],
)
def test_a_file_that_is_no_text_gets_the_advice_that_fits(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path / name)


@pytest.mark.parametrize("row", [{**ALPACA, "system": "Be brief."}, {**ALPACA, "history": HISTORY}])
def test_a_model_without_chats_names_the_column_that_makes_a_chat(tmp_path: Path, row: Row) -> None:
    path = write(tmp_path / "rows.jsonl", [row] * 2)
    name = "system" if "system" in row else "history"
    for model in ("tiny-t5", "tiny-llama"):
        with pytest.raises(
            ConfigError,
            match=sentence("The row is a chat because of", f"['{name}']"),
        ):
            prepare(
                dataset_from(str(path)),
                tmp_path / "out",
                refusal=row_refusal(FineTune(model=model)),
            )


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        # A name of another use than the key is never suggested, such as `lose` for `chosen`.
        ({"prompt": "q", "win": "a", "lose": "b"}, {"chosen": "…", "rejected": "…"}),
        ({"prompt": "q", "rejected": "b", "accepted": "a"}, {"chosen": "accepted"}),
        ({"prompt": "q", "response": "a", "score": 3}, {"chosen": "…", "rejected": "…"}),
        ({"Prompts": "q", "Chosen": "a", "Reject": "b"}, {"prompt": "Prompts", "chosen": "Chosen"}),
    ],
)
def test_a_missing_part_of_a_pair_gets_no_column_of_another_use(
    tmp_path: Path, row: Row, columns: Mapping[str, str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(write(tmp_path / "rows.jsonl", [row] * 2), "dpo")
    for key, name in columns.items():
        assert f"{key!r}: {name!r}" in str(refused.value)


@pytest.mark.parametrize("others", [{}, {"id": 7, "notes": "x", "revision": "y", "tags": "z"}])
@pytest.mark.parametrize("asks", sorted({form.asks for form in FORMS if not form.heading}))
@pytest.mark.parametrize("answers", sorted({form.answers for form in FORMS if not form.heading}))
def test_names_of_a_question_and_of_an_answer_of_any_form_are_suggested(
    asks: str, answers: str, others: Row
) -> None:
    suggested, is_near = suggested_columns({**others, answers: "a", asks: "q"})
    question, answer = suggested.items()
    assert (question[1], answer[1], is_near) == (asks, answers, True)
    assert any({question[0], answer[0]} == {form.asks, form.answers} for form in FORMS)


@pytest.mark.parametrize("row", [{"request": {"log": CHAT}}, {"id": 7, "body": {"turns": CHAT}}])
def test_turns_within_an_object_are_suggested_by_their_path(row: Row) -> None:
    suggested, _ = suggested_columns(row)
    read = row_from(renamed(row, suggested, "here"), "here")
    assert len(read.messages) == len(CHAT)


@pytest.mark.parametrize("turn", [{"user": "Hi"}, {"speaker": "user", "text": "Hi"}, "Hi", 7, None])
def test_a_turn_without_a_role_names_the_form_of_a_turn(turn: object) -> None:
    with pytest.raises(ConfigError, match=r'messages\[0\] is .*Write a turn as \{"role": "user"'):
        row_from({"messages": [turn, CHAT[1]]}, "here")
