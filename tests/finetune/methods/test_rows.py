"""Rows of pairs, of judged answers and of prompts are read, or refused by line and column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.methodruns import pairs, write_rows
from workbench import FineTune, preview
from workbench.base.errors import ConfigError
from workbench.finetune.data.rows import Example, UnknownForm, prepared_row
from workbench.finetune.data.sources.dataset import dataset_from, prepare
from workbench.finetune.data.training.rows import load
from workbench.finetune.methods.registry import method_of
from workbench.finetune.methods.rows import LABEL, columns_of, rejected_of

ASKED = [{"role": "user", "content": "1+1?"}]


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


def read(method: str, row: dict[str, Any]) -> Example:
    example = method_of(method).rows.read(row, "line 1")
    # What is prepared here is what pods read.
    assert prepared_row(json.loads(example.to_json())) == example
    return example


def test_a_pair_is_read_as_text_as_messages_and_without_a_prompt() -> None:
    text = read("dpo", {"prompt": "1+1?", "chosen": "2", "rejected": "3"})
    assert (text.source, text.target, rejected_of(text)["content"]) == ("1+1?", "2", "3")
    chat = read("dpo", {"prompt": ASKED, "chosen": said("2"), "rejected": said("3")})
    assert [turn["role"] for turn in chat.messages] == ["user", "assistant"]
    assert (chat.source, chat.target, rejected_of(chat)["content"]) == ("1+1?", "2", "3")
    whole = {"chosen": ASKED + said("2"), "rejected": ASKED + said("3")}
    assert read("reward", whole) == chat
    talk = "Human: 1+1? Assistant: "
    implicit = read("orpo", {"chosen": f"{talk}two it is", "rejected": f"{talk}three it is"})
    assert implicit.source == "Human: 1+1? Assistant:"
    assert (implicit.target, rejected_of(implicit)["content"]) == (" two it is", " three it is")


def test_a_judged_answer_has_any_form_of_question_and_answer() -> None:
    for row in (
        {"prompt": "1+1?", "completion": "2", "label": True},
        {"instruction": "1+1?", "output": "2", "kto_tag": "true"},
        {"messages": ASKED + said("2"), "label": True},
        {"prompt": ASKED, "completion": said("2"), "label": True},
    ):
        example = read("kto", row)
        assert (example.source, example.target) == ("1+1?", "2")
        assert example.beside[LABEL] is True
    assert read("kto", {"prompt": "a", "completion": "b", "label": False}).beside[LABEL] is False


def test_a_prompt_passes_its_other_columns_on() -> None:
    text = read("grpo", {"question": "1+1?", "answer": "2", "level": 3})
    assert text.source == "1+1?" and columns_of(text) == {"answer": "2", "level": 3}
    chat = read("grpo", {"prompt": ASKED, "answer": "2"})
    assert chat.messages[-1]["role"] == "user" and columns_of(chat) == {"answer": "2"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dpo", {"prompt": "a", "chosen": "b"}, "line 1: .* 'rejected' is missing; there is: 'prompt'"),
    ("dpo", {"prompt": "a", "completion": "b"}, "'chosen' is missing"),
    ("dpo", {"prompt": "a", "chosen": "", "rejected": "b"}, "line 1: chosen is empty"),
    (
        "dpo",
        {"prompt": "a", "chosen": ASKED + said("b"), "rejected": ASKED + said("c")},
        "do not begin",
    ),
    ("dpo", {"chosen": "b", "rejected": "c"}, "write the prompt as a column 'prompt'"),
    (
        "dpo",
        {"prompt": ASKED, "chosen": said("b") + ASKED, "rejected": said("c")},
        "turns after the prompt: assistant, user",
    ),
    ("kto", {"prompt": "a", "completion": "b"}, "'label' is missing"),
    (
        "kto",
        {"prompt": "a", "completion": "b", "label": "good"},
        'label is "good"; write true',
    ),
    ("kto", {"prompt": "a", "completion": "b", "label": 1}, "label is 1; write true"),
    ("kto", {"prompt": "a", "completion": "", "label": True}, "completion is empty"),
    ("kto", {"text": "a", "label": True}, "'prompt' is missing"),
    ("grpo", {"answer": "a"}, "'prompt' .* is missing|'prompt' is missing"),
    ("grpo", {"prompt": "a", "completions": "b"}, "rename the column"),
    ("grpo", {"prompt": ASKED + said("b")}, "end the list with the question"),
    ("grpo", {"prompt": "Add.", "messages": ASKED}, "prompt and 'messages' may both be the prompt"),
]


@pytest.mark.parametrize(("method", "row", "words"), REFUSED)
def test_a_row_without_meaning_is_refused_by_place_and_column(
    method: str, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read(method, row)


def test_a_number_and_a_list_of_ranks_are_no_answers_to_name() -> None:
    row = {"prompt": "a", "answers": [{"answer": "b", "rank": 1}], "turns": 1}
    with pytest.raises(UnknownForm) as refused:
        read("dpo", row)
    assert refused.value.columns == {"prompt": "prompt", "chosen": "…", "rejected": "…"}


def made(folder: Path, method: str, rows: list[dict[str, Any]], **options: Any) -> Any:
    path = write_rows(folder / "rows.jsonl", rows)
    dataset = dataset_from({"kind": "files", "train": str(path), **options})
    return prepare(dataset, folder / "made", reader=method_of(method).rows)


def test_equal_answers_are_counted_and_refused_when_they_are_many(tmp_path: Path) -> None:
    rows = [dict(row) for row in pairs(0, 12)]
    rows[3]["rejected"] = rows[3]["chosen"]
    (tmp_path / "few").mkdir()
    prepared = made(tmp_path / "few", "dpo", rows)
    assert list(prepared.remarks.values()) == [1]
    assert "equal chosen and rejected" in next(iter(prepared.remarks))
    for row in rows[:8]:
        row["rejected"] = row["chosen"]
    with pytest.raises(ConfigError, match=r"8 of 12 rows have equal chosen and rejected"):
        made(tmp_path, "dpo", rows)


def columns_in(path: Path) -> list[list[str]]:
    return [list(json.loads(line)["beside"]["columns"]) for line in path.read_text().splitlines()]


def test_every_prompt_gets_the_columns_of_all_rows_with_none_where_it_has_none(
    tmp_path: Path,
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n}?", "answer": str(n)} for n in range(12)]
    del rows[0]["answer"]
    rows[3] = {"messages": ASKED, "level": 3}
    prepared = made(tmp_path, "grpo", rows)
    assert prepared.train is not None and prepared.eval is not None
    every = columns_in(prepared.train) + columns_in(prepared.eval)
    assert len(every) == 12
    assert {frozenset(names) for names in every} == {frozenset(("answer", "level"))}
    assert len({tuple(names) for names in every}) == 1
    kept = [prepared_row(json.loads(line)) for line in prepared.train.read_text().splitlines()]
    assert {columns_of(row)["answer"] for row in kept} <= {None, *map(str, range(12))}
    assert prepared.not_read == []


def test_parts_of_a_mix_get_the_columns_of_all_parts(tmp_path: Path) -> None:
    for name, column in (("a", "answer"), ("b", "grade")):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": "1?", column: "2"}] * 4)
    mix = {"kind": "mix", "parts": [{"dataset": str(tmp_path / f"{n}.jsonl")} for n in "ab"]}
    prepared = prepare(dataset_from(mix), tmp_path / "made", reader=method_of("grpo").rows)
    assert prepared.train is not None and prepared.eval is not None
    every = columns_in(prepared.train) + columns_in(prepared.eval)
    assert every == [["answer", "grade"]] * 8 or every == [["grade", "answer"]] * 8


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_are_all_alike_are_counted(tmp_path: Path, label: bool) -> None:
    rows = [{"prompt": f"{n}?", "completion": str(n), "label": label} for n in range(8)]
    prepared = made(tmp_path, "kto", rows)
    ((remark, count),) = prepared.remarks.items()
    this, other = ("true", "false") if label else ("false", "true")
    assert f"the label {this} for training, where no row has the label {other}" in remark
    assert count == prepared.train_rows == 7


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"label": None}, "label is empty; write true"),
        ({"kto_tag": ""}, "kto_tag is empty; write true"),
        ({"label": True, "kto_tag": False}, "kto_tag is another text or list than 'label'"),
        *[({"label": odd}, "label is .*; write true") for odd in (1, 0, "1", "yes", "good", -1)],
    ],
)
def test_a_label_that_is_no_verdict_is_refused(label: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"here: {message}"):
        method_of("kto").rows.read({"prompt": "Hi", "completion": "Hello.", **label}, "here")


@pytest.mark.parametrize("name", ["chat_history", "past_turns", "sys_prompt"])
def test_turns_before_a_prompt_never_reach_the_rewards_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", name: "a", "context_length": 3}) + "\n")
    dataset = dataset_from({"kind": "files", "train": [str(path)] * 2})
    with pytest.raises(ConfigError, match=f"the column '{name}' belongs to the prompt"):
        prepare(dataset, tmp_path / "out", reader=method_of("grpo").rows)


def test_labels_of_both_kinds_need_no_remark_also_from_two_files(tmp_path: Path) -> None:
    for label in (True, False):
        rows = [{"prompt": f"{n}?", "completion": "a", "label": label} for n in range(4)]
        write_rows(tmp_path / f"{label}.jsonl", rows)
    parts = [{"dataset": str(tmp_path / f"{label}.jsonl")} for label in (True, False)]
    mix = dataset_from({"kind": "mix", "parts": parts})
    assert not prepare(mix, tmp_path / "made", reader=method_of("kto").rows).remarks


@pytest.mark.slow
def test_labels_of_a_hub_dataset_that_are_all_alike_are_counted(tmp_path: Path) -> None:
    judged = [{"prompt": f"{n}?", "completion": "2", "label": True} for n in range(4)]
    write_rows(tmp_path / "train.jsonl", judged)
    hub = {"kind": "hub", "name": str(tmp_path), "eval_share": 0.5}
    assert list(load(None, None, hub, method_of("kto").rows).remarks.values()) == [2]


def test_columns_are_named_and_columns_beside_are_reported(tmp_path: Path) -> None:
    rows = [
        {"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"], "id": number}
        for number, row in enumerate(pairs(0, 8))
    ]
    named = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    prepared = made(tmp_path, "dpo", rows, columns=named)
    assert prepared.not_read == ["id"] and prepared.train_rows + prepared.eval_rows == 8


def test_a_dataset_of_answers_alone_is_refused_for_pairs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'wikisql-mini' has questions and answers, and a row of"):
        prepare(dataset_from("wikisql-mini"), tmp_path, reader=method_of("dpo").rows)


def test_sft_names_the_method_for_its_columns(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method='dpo'"):
        made(tmp_path, "sft", [{"prompt": "a", "completion": "b", "rejected": "c"}] * 4)
    with pytest.raises(ConfigError, match="method='kto'"):
        made(tmp_path, "sft", [{"prompt": "a", "completion": "b", "label": True}] * 4)


@pytest.mark.slow
def test_a_preview_shows_both_answers_of_a_pair(tmp_path: Path) -> None:
    rows = [dict(row) for row in pairs(0, 8)]
    rows[2]["rejected"] = rows[2]["chosen"]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    shown = preview(FineTune(model="tiny-llama", method="dpo", dataset=str(path)), rows=2)
    assert sum(shown.remarks.values()) == 1
    for pieces in shown.rows:
        learned = [text for text, is_learned in pieces if is_learned]
        assert len(learned) == 2 and all(text.endswith("</s>") for text in learned)
        assert any("rejected" in text for text, is_learned in pieces if not is_learned)


@pytest.mark.slow
def test_a_preview_of_prompts_shows_the_columns_for_the_rewards(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"Say {n}."}], "answer": f"number {n}"}
        for n in range(8)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    job = FineTune(
        model="tiny-llama",
        method="grpo",
        rewards=[lambda completions, answer: [0.0] * len(completions)],
        method_options={"num_generations": 2},
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        dataset=str(path),
    )
    shown = preview(job, rows=1)
    words = "".join(text for text, _ in shown.rows[0])
    assert "<user>Say" in words and "answer: number" in words
    assert not any(is_learned for _, is_learned in shown.rows[0])
