"""Fields read within columns and from templates, and shares of rows, of every kind of dataset."""

from __future__ import annotations

import ast
import csv
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import Hub, Prepared, RowFiles, dataset_from, prepare
from workbench.finetune.job.finetune import FineTune

Rows = Sequence[Mapping[str, Any]]
SQUAD: Rows = [
    {
        "id": n,
        "question": f"Where {n}?",
        "answers": {"text": [f"There {n}.", "Here."], "answer_start": [n, 0]},
        "place": {"city": {"name": f"Town {n}"}, "size": n},
        "url": "u",
    }
    for n in range(30)
]
COLUMNS = {
    "source": "In {place.city.name} of size {place.size}: {question}",
    "target": "answers.text",
}
EXPECTED = [(f"In Town {n} of size {n}: Where {n}?", f"There {n}.") for n in range(30)]


def as_lines(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        to = csv.DictWriter(file, rows[0])
        to.writeheader()
        for row in rows:
            to.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})


def as_parquet(path: Path, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def as_saved(path: Path, rows: Rows) -> None:
    import datasets

    datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))


WRITERS: Mapping[str, Callable[[Path, Rows], None]] = {
    "rows.jsonl": as_lines,
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)) and None,
    "rows.csv": as_csv,
    "rows.parquet": as_parquet,
    "saved": as_saved,
}


def made(path: Path, **options: object) -> Prepared:
    value = {"kind": "files", "train": str(path), "eval": str(path), **options}
    return prepare(dataset_from(value), path.parent / "out")


def pairs(file: Path | None) -> list[tuple[str, str]]:
    assert file is not None
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["source"], row["target"]) for row in rows]


@pytest.mark.parametrize("name", WRITERS)
def test_paths_and_templates_read_the_same_of_every_format(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, SQUAD)
    read = made(tmp_path / name, columns=COLUMNS)
    assert pairs(read.train) == pairs(read.eval) == EXPECTED
    assert sorted(read.not_read) == ["id", "url"], "what a template or a path reads is read"


def test_parts_of_a_mix_and_a_folder_for_the_hub_have_paths_too(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    as_lines(repository / "train.jsonl", SQUAD)
    as_lines(repository / "validation.jsonl", SQUAD[:3])
    hub = {"kind": "hub", "name": str(repository), "columns": COLUMNS, "limit": "10%"}
    found = prepare(dataset_from(hub), tmp_path / "out")
    assert sorted(found.not_read) == ["id", "url"]
    files = {"kind": "files", "train": str(repository / "train.jsonl"), "columns": COLUMNS}
    mix = {"kind": "mix", "parts": [{"dataset": hub}, {"dataset": {**files, "limit": "50%"}}]}
    mixed = prepare(dataset_from(mix), tmp_path / "mixed")
    assert mixed.train_rows == 3 + 14 and mixed.eval_rows == 3 + 1
    assert set(pairs(mixed.train)) <= set(EXPECTED[:15]) and sorted(mixed.not_read) == ["id", "url"]


def test_the_pods_read_values_of_a_table_as_files_are_read(tmp_path: Path) -> None:
    from workbench.finetune.data.training.rows import load

    repository = tmp_path / "repository"
    repository.mkdir()
    values = [date(2026, 1, 2), b"text", "text"]
    for number, value in enumerate(values):
        as_parquet(repository / f"{number}.parquet", [{"question": f"{number}?", "answer": value}])
    for number, learned in enumerate(["2026-01-02", "text", "text"]):
        path = repository / f"{number}.parquet"
        files = prepare(RowFiles(train=str(path), eval=str(path)), tmp_path / "out")
        assert pairs(files.train) == [(f"{number}?", learned)]
        folder = tmp_path / f"hub-{number}"
        folder.mkdir()
        path.rename(folder / "train.parquet")
        hub = Hub(name=str(folder), eval_split="train").model_dump()
        assert [row.target for row in load(None, None, hub).train] == [learned]


def test_the_pods_read_paths_and_shares_of_the_hub_alike(tmp_path: Path) -> None:
    from workbench.finetune.data.training.rows import load

    repository = tmp_path / "repository"
    repository.mkdir()
    as_lines(repository / "train.jsonl", SQUAD)
    as_lines(repository / "validation.jsonl", SQUAD[:4])
    for split, share, rows in (("train", "10%", 3), ("train[:20]", "12.5%", 3)):
        value = {"kind": "hub", "name": str(repository), "columns": COLUMNS, "limit": share}
        dataset = dataset_from({**value, "train_split": split})
        on_pod = load(None, None, prepare(dataset, tmp_path / "out").hub)
        assert [(row.source, row.target) for row in on_pod.train] == EXPECTED[:rows]
        assert len(on_pod.eval) == 4 and [*on_pod.not_read] == ["id", "url"]
    held = Hub(name=str(repository), columns=COLUMNS, limit="50%", eval_share=0.2, seed=3)
    on_pod = load(None, None, held.model_dump())
    files = {"train": str(repository / "train.jsonl"), "eval_share": 0.2, "seed": 3}
    here = prepare(RowFiles(**files, columns=COLUMNS, limit="50%"), tmp_path / "here")  # type: ignore[arg-type]
    assert [(row.source, row.target) for row in on_pod.train] == pairs(here.train)
    assert [(row.source, row.target) for row in on_pod.eval] == pairs(here.eval)
    assert (here.train_rows, here.eval_rows) == (12, 3)


def test_a_share_is_of_all_files_of_a_part_and_the_rest_is_not_checked(tmp_path: Path) -> None:
    rows = [{"source": str(n), "target": "" if n > 9 else "a"} for n in range(25)]
    as_lines(tmp_path / "a.jsonl", rows[:15])
    as_lines(tmp_path / "b.jsonl", rows[15:])
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    value = {"kind": "files", "train": paths, "eval": paths[0], "limit": "40 %"}
    read = prepare(dataset_from({**value, "eval_share": None}), tmp_path / "out")
    assert [source for source, _ in pairs(read.train)] == [str(n) for n in range(10)]
    assert (read.train_rows, read.eval_rows, read.empty_answers) == (10, 15, 5)


@pytest.mark.parametrize("limit", ["0%", "101%", "ten", "10", "-5%", 0, True, 1.5])
def test_a_limit_is_a_number_or_a_share(limit: object) -> None:
    for dataset in (Hub, RowFiles):
        with pytest.raises(ConfigError, match="limit is"):
            dataset.from_dict({"name" if dataset is Hub else "train": "a", "limit": limit})


def test_a_column_of_exactly_the_name_comes_first(tmp_path: Path) -> None:
    row = {"a.b": "dotted", "a": {"b": "within", "c.d": {"e": 5}}, "{x}": "braced", "x": "filled"}
    path = tmp_path / "rows.jsonl"
    for named, value in {
        "a.b": "dotted",
        "{x}": "braced",
        "{x} {a.b}": "filled dotted",
        "a.c.d.e": "5",
        "{{{x}}}": "{filled}",
    }.items():
        as_lines(path, [row] * 2)
        read = made(path, columns={"source": named, "target": "x"})
        assert pairs(read.train)[0][0] == value, named


def test_turns_within_a_column_are_a_chat(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    as_lines(tmp_path / "rows.jsonl", [{"data": {"turns": turns}, "more": 1}])
    read = made(tmp_path / "rows.jsonl", columns={"messages": "data.turns"})
    assert pairs(read.train) == [("1+1?", "2")] and read.not_read == ["more"]


def test_a_list_of_objects_is_read_at_its_first(tmp_path: Path) -> None:
    rows = [
        {"q": "a", "answers": [{"text": "one"}, {"text": "two"}]},
        {"q": "b", "answers": [{"text": ["three", "four"]}]},
        {"q": "c", "answers": []},
        {"q": "d", "answers": None},
        {"q": "e", "answers": [{"text": "five"}]},
    ]
    as_lines(tmp_path / "rows.jsonl", rows)
    read = made(tmp_path / "rows.jsonl", columns={"question": "q", "answer": "answers.text"})
    assert [target for _, target in pairs(read.train)] == ["one", "three", "", "", "five"]
    assert read.empty_answers == 4, "two of training and two of evaluation"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("answers.txt", r"'answers\.txt' is not known: did you mean 'answers\.text'\? Allowed"),
        ("answer.text", r"'answer\.text' is not known"),
        ("place.city.nam", r"did you mean 'place\.city\.name'"),
        (
            "url.text",
            r"'url\.text' is a path into 'url', and the value there is \"u\"\. Name a column",
        ),
        ("Q: {questio}", r"in 'Q: \{questio\}': 'questio' is not known: did you mean 'question'"),
        ("Q: {answers}", r"reads 'answers', and the value \{\"text\": .* is no text"),
        ("Q: {}", r"braces without a name"),
        ("Q: {question", r"braces without a name"),
        ("Q: question}", r"braces without a name"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(
    tmp_path: Path, named: str, message: str
) -> None:
    as_lines(tmp_path / "rows.jsonl", SQUAD)
    where = r"rows\.jsonl, line 1: the column for 'answer'"
    with pytest.raises(ConfigError, match=f"{where}.*{message}"):
        made(tmp_path / "rows.jsonl", columns={"question": "question", "answer": named})


def test_an_empty_field_of_a_template_is_refused(tmp_path: Path) -> None:
    as_lines(tmp_path / "rows.jsonl", [{"a": "x", "b": "y"}, {"a": None, "b": "y"}])
    with pytest.raises(ConfigError, match=r"line 2: the column for 'source'.*reads 'a'.*null"):
        made(tmp_path / "rows.jsonl", columns={"source": "{a} and {b}", "target": "b"})


def test_pictures_beside_a_template_and_ignored_columns_of_one_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "images": ["cat.png"]} for row in SQUAD]
    as_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match="column 'images' holds images"):
        made(tmp_path / "rows.jsonl", columns=COLUMNS)
    for name in ("place", "question", "answers"):
        with pytest.raises(ConfigError, match=f"ignore leaves out '{name}', and columns reads"):
            made(tmp_path / "rows.jsonl", columns=COLUMNS, ignore=[name])
    read = made(tmp_path / "rows.jsonl", columns=COLUMNS, ignore=["images"])
    assert "images" in read.not_read


def meant(error: ConfigError) -> object:
    """Return the dataset that an error says to write."""
    return ast.literal_eval(str(error).split("write dataset=")[1].splitlines()[0])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("columns", {"source": "a", "target": "b"}),
        ("ignore", ["label"]),
        ("drop_empty", True),
        ("eval_share", 0.25),
        ("limit", 10),
    ],
)
def test_an_option_of_the_dataset_beside_the_dataset_names_the_whole_dataset(
    tmp_path: Path, option: str, value: object
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "1+1?", "b": "2"}\n' * 2)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(file.read_text())
    for dataset in (str(file), str(folder), {"kind": "files", "train": [str(file)]}, "owner/qa"):
        with pytest.raises(ConfigError, match=f"option '{option}' is not known: write ") as refused:
            FineTune(model="tiny-t5", dataset=dataset, **{option: value})
        job = FineTune(model="tiny-t5", dataset=meant(refused.value))
        made = dataset_from(job.dataset)
        read = made.to_dict()[option]
        assert read == value or [*read] == value  # type: ignore[misc]
        assert made.kind == ("hub" if dataset == "owner/qa" else "files")


def test_several_options_of_the_dataset_are_named_together() -> None:
    with pytest.raises(ConfigError) as refused:
        FineTune(model="tiny-t5", dataset="rows.csv", columns={"text": "a"}, ignore=["label"])
    given = {"columns": {"text": "a"}, "ignore": ["label"]}
    assert meant(refused.value) == {"kind": "files", "train": "rows.csv", **given}
    with pytest.raises(ConfigError, match="option 'columns' is not known: write 'columns' into"):
        FineTune(model="tiny-t5", dataset={"kind": "mix", "parts": []}, columns={"text": "a"})
    # A named dataset has no columns to name.
    with pytest.raises(ConfigError, match=r"option 'columns' is not known\. Allowed"):
        FineTune(model="tiny-t5", dataset="wikisql-mini", columns={"text": "a"})
