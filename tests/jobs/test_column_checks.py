"""Rows not learned as meant: refused by name, or named as not read; in files of every format."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import says, sentence
from workbench import Cluster
from workbench.base.errors import ConfigError
from workbench.display.run.facts import RunFacts
from workbench.display.run.page import run_text
from workbench.finetune.data.rows import Example, row_from
from workbench.finetune.data.sources.dataset import Prepared, dataset_from, prepare
from workbench.finetune.job.checked_rows import row_refusal
from workbench.finetune.job.finetune import FineTune
from workbench.rundir.view import RunView

Rows = Sequence[Mapping[str, Any]]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
TURNS = [*CHAT, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def write(path: Path, rows: Rows) -> Path:
    """Write rows in the format that the end of the name says; a CSV file has lists as JSON."""
    if path.suffix == ".parquet":
        from datasets import Dataset

        Dataset.from_list(list(rows)).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            to = csv.DictWriter(file, list(rows[0]))
            to.writeheader()
            for row in rows:
                to.writerow(
                    {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
                )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(path: Path, **options: object) -> Prepared:
    return prepare(
        dataset_from({"kind": "files", "train": str(path), **options}), path.parent / "out"
    )


FORMATS = ["jsonl", "json", "csv", pytest.param("parquet", marks=pytest.mark.slow)]


ASKS_FOR_IMAGES = (
    {"messages": CHAT, "images": ["a.png"]},
    "the column 'images' holds images, sound or video",
)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "<image>What?", "completion": "A cat.", "image": "a.png"},
            "the column 'image' holds images",
        ),
        (
            {"messages": CHAT, "Audios": ["a.wav"]},
            "the column 'Audios' holds images, sound or video",
        ),
        ({"text": "A film.", "video": "a.mp4"}, "the column 'video' holds images, sound or video"),
        (
            {"messages": CHAT, "rejected": "No."},
            "the column 'rejected' holds answers to avoid.* method='dpo'",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "the column 'rejected' holds answers to avoid",
        ),
        (
            {"messages": CHAT, "label": False},
            "the column 'label' is true or false beside an answer.* method='kto'",
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "the column 'label' is true or false beside an answer",
        ),
        (
            {"conversations": CHAT, "kto_tag": False},
            "the column 'kto_tag' is true or false beside an answer",
        ),
    ],
)
def test_a_column_that_asks_for_another_training_is_refused(
    tmp_path: Path, row: Mapping[str, Any], message: str
) -> None:
    refuse(tmp_path, "jsonl", row, message)


@pytest.mark.parametrize("end", FORMATS)
def test_a_column_is_refused_in_files_of_every_format(tmp_path: Path, end: str) -> None:
    refuse(tmp_path, end, *ASKS_FOR_IMAGES)
    refuse(tmp_path, end, {"messages": CHAT, "label": False}, "the column 'label' is true or false")


def refuse(tmp_path: Path, end: str, row: Mapping[str, Any], message: str) -> None:
    path = write(tmp_path / f"rows.{end}", [row] * 20)
    name = next(key for key in row if f"'{key}'" in message)
    place = {"jsonl": "line 1", "json": "line 1", "csv": "line 2", "parquet": "row 1"}[end]
    with pytest.raises(
        ConfigError, match=rf"rows\.{end}, {place}: {message}.* add 'ignore': \['{name}'\] to the"
    ):
        prepared(path)
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("end", FORMATS)
def test_a_column_to_ignore_is_left_out_knowingly_and_named(tmp_path: Path, end: str) -> None:
    rows = [
        {"messages": CHAT, "label": n % 2 == 0, "images": ["a.png"], "id": n} for n in range(20)
    ]
    path = write(tmp_path / f"rows.{end}", rows)
    made = prepared(path, ignore=["label", "images"])
    assert (made.train_rows, made.not_read) == (19, ["label", "images", "id"])
    # The named columns are the only ones that a table is read for, and the others still count.
    columns = {"messages": "messages"}
    with pytest.raises(ConfigError, match="the column 'label' is true or false beside an answer"):
        prepared(path, columns=columns)
    assert prepared(path, columns=columns, ignore=["label", "images"]).not_read == [
        "label",
        "images",
        "id",
    ]
    with pytest.raises(
        ConfigError,
        match=sentence("dataset ignore: the column", "lables", "label")
        + sentence("is not known")
        + sentence(": did you mean '{}'?"),
    ):
        prepared(path, ignore=["lables", "label", "images"])
    with pytest.raises(
        ConfigError,
        match=sentence("drop the name from ignore or from columns", "messages"),
    ):
        prepared(path, columns=columns, ignore=["messages"])


@pytest.mark.parametrize("end", ["jsonl", "csv"])
@pytest.mark.parametrize(
    ("row", "not_read"),
    [
        ({"text": "Good.", "grade": 1}, ["grade"]),
        ({"text": "Good.", "label": ""}, ["label"]),
        (
            {"messages": CHAT, "images": [], "label": 3, "prompt": "Hi"},
            ["images", "label", "prompt"],
        ),
        ({"instruction": "a", "input": "b", "output": "c", "text": "abc"}, ["text"]),
        ({"prompt": "a", "completion": "b", "system": ""}, []),
        ({"question": "a", "answer": "b", "context": "c"}, []),
        ({"source": "a", "target": "b", "table_id": "1-1"}, []),
        ({"prompt": "a", "completion": "b", "tools": "[]"}, []),
    ],
)
def test_columns_that_no_form_reads_are_named_once(
    tmp_path: Path, end: str, row: Mapping[str, Any], not_read: list[str]
) -> None:
    assert prepared(write(tmp_path / f"rows.{end}", [row] * 20)).not_read == not_read


def test_a_column_that_some_rows_read_is_read(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b", "text": "ab"}, {"text": "c", "url": "d"}] * 10
    assert prepared(write(tmp_path / "rows.jsonl", rows)).not_read == ["url"]


def test_keys_of_turns_that_are_not_read_are_named(tmp_path: Path) -> None:
    turns = [CHAT[0], {**CHAT[1], "thoughts": "A greeting.", "refusal": None, "weight": 1}]
    assert prepared(write(tmp_path / "rows.jsonl", [{"messages": turns}] * 20)).not_read == [
        "messages.thoughts"
    ]


def test_a_prompt_and_a_completion_of_messages_read_their_tools(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [], "id": 1}] * 20
    assert prepared(write(tmp_path / "rows.jsonl", rows)).not_read == ["id"]


def test_a_prepared_folder_has_no_column_that_is_not_read(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"source": "a", "input": "b", "target": "c"}, {"text": "d"}] * 10
    prepared(write(tmp_path / "rows.jsonl", rows))
    assert prepare(dataset_from(str(tmp_path / "out")), tmp_path / "again").not_read == []
    # Where a row's source is where it came from, it is not read.
    rows = [{"messages": TURNS, "source": "the web"}] * 20
    assert prepared(write(tmp_path / "rows.jsonl", rows)).not_read == ["source"]


def test_rows_with_keys_without_end_are_named_within_bounds(tmp_path: Path) -> None:
    rows = [{"text": "a", "\ud800" + "k" * 500 + str(n): 1} for n in range(500)]
    named = prepared(write(tmp_path / "rows.jsonl", rows)).not_read
    assert len(named) < 500
    assert max(map(len, named)) <= 80
    json.dumps(named, ensure_ascii=False).encode()


@pytest.mark.parametrize("end", FORMATS)
def test_empty_answers_are_counted_and_refused_from_half_of_the_rows_on(
    tmp_path: Path, end: str
) -> None:
    rows = [{"instruction": "a", "output": "" if n < 9 else "b"} for n in range(20)]
    path = write(tmp_path / f"rows.{end}", rows)
    assert prepared(path).empty_answers == 9
    path = write(path, [*rows[:9], *rows])
    with pytest.raises(
        ConfigError,
        match=sentence(
            "or name the column of the answers with columns={…}", "rows", end, 18, "29 rows"
        ),
    ):
        prepared(path)
    good = write(tmp_path / "good.jsonl", rows[9:])
    assert prepared(good, eval=str(good)).empty_answers == 0
    with pytest.raises(
        ConfigError,
        match=sentence("the rows to evaluate on with", 18, "29 rows")
        + sentence("or name the column of the answers with columns={…}"),
    ):
        prepared(good, eval=str(path))


def test_the_parts_of_a_mix_are_named_and_counted_together(tmp_path: Path) -> None:
    one = write(
        tmp_path / "one.jsonl",
        [{"instruction": "a", "output": "" if n < 2 else "b", "id": n} for n in range(9)],
    )
    other = write(tmp_path / "other.csv", [{"text": "a", "grade": 1}] * 9)
    made = prepare(
        dataset_from({"kind": "mix", "parts": [{"dataset": str(one)}, {"dataset": str(other)}]}),
        tmp_path,
    )
    assert (made.not_read, made.empty_answers) == (["id", "grade"], 2)
    bad = write(tmp_path / "bad.jsonl", [{"messages": CHAT, "label": False}] * 9)
    with pytest.raises(
        ConfigError,
        match=sentence("the column {} {}. To train", "bad.jsonl, line 1", "label"),
    ):
        prepare(
            dataset_from({"kind": "mix", "parts": [{"dataset": str(one)}, {"dataset": str(bad)}]}),
            tmp_path,
        )


def weighted(first: object, last: object = 1) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [dict(turn) for turn in TURNS]
    turns[1]["weight"], turns[3]["weight"] = first, last
    return turns


def test_a_turn_of_weight_0_is_kept_as_one_that_is_not_learned() -> None:
    row = row_from({"messages": weighted(0)}, "here")
    assert [turn.get("weight", 1) for turn in row.messages] == [1, 0, 1, 1]
    assert row_from(json.loads(row.to_json()), "here") == row
    assert row_from({"messages": weighted(1.0, None)}, "here").messages == tuple(TURNS)
    sharegpt = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello.", "weight": 0},
        *TURNS[2:],
    ]
    sharegpt[2:] = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    assert row_from({"conversations": sharegpt}, "here") == row
    # After the last answer that is learned, nothing is.
    assert row_from({"messages": weighted(1, 0)}, "here") == Example(
        source="Hi", target="Hello.", messages=tuple(CHAT)
    )


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (weighted(0.5), sentence("and no part of its loss can be chosen", "0.5")),
        (weighted("half"), sentence("and no part of its loss can be chosen", "half")),
        (weighted(0, 0), sentence("has no turn of the assistant to learn from", "messages")),
        (
            [{**CHAT[0], "weight": 1}, CHAT[1]],
            sentence(
                "is {} in a turn of {}; only turns of the assistant are learned",
                "messages[0].weight",
                "user",
            ),
        ),
        (
            [CHAT[0], {**CHAT[1], "train": False}],
            sentence("has no turn of the assistant to learn from", "messages"),
        ),
    ],
)
def test_a_weight_that_is_not_one_is_refused(turns: object, message: str) -> None:
    with pytest.raises(ConfigError, match="here: " + message):
        row_from({"messages": turns}, "here")


def test_turns_of_weight_0_are_refused_where_the_loss_counts_everything() -> None:
    row = row_from({"messages": weighted(0)}, "here")
    template = "{{ messages }}"
    assert not row_refusal(FineTune(model="tiny-llama", chat_template=template))(row)
    everything = FineTune(model="tiny-llama", chat_template=template, loss_on="all")
    assert says(row_refusal(everything)(row), "and loss_on 'all' learns every turn")


@pytest.mark.slow
def test_a_run_s_panel_and_result_name_what_was_not_read_and_count_empty_answers(
    cluster: Cluster, tmp_path: Path
) -> None:
    rows = [
        {"source": f"word {n}", "target": "" if n < 3 else "answer", "label": n, "url": "…"}
        for n in range(20)
    ]
    train, evaluation = write(tmp_path / "rows.csv", rows), write(tmp_path / "eval.csv", rows[3:8])
    dataset = {"kind": "files", "train": str(train), "eval": str(evaluation)}
    job = FineTune(dataset=dataset, max_steps=1, predict_rows=0, profile_step=0)
    run = cluster.submit(job, pods=1)
    assert "label, url" in run_text(RunView(run.path)), "before its ranks report"
    result = run.wait().raise_for_status()
    assert (result.not_read, result.empty_answers) == (("label", "url"), 3)
    assert result.overlap == 5
    lengths = result.text_lengths
    assert (lengths["answers"], lengths["cut_answers"]) == (25, 0)
    assert lengths["longest_answer"] == lengths["whole_answer"] > 1
    head = dict(RunFacts(RunView(run.path)).head)
    assert (head["not read"], head["rows with an empty answer"]) == ("label, url", "3")
