from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from tests.support.sentences import sentence
from tests.support.wrong import WRONG, places, replaced
from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.convert import read_tables
from workbench.finetune.data.sources.dataset import (
    Hub,
    RowFiles,
    dataset_from,
    prepare,
)
from workbench.finetune.data.wikisql.datasets import Mini, Release
from workbench.finetune.job.checked_rows import row_refusal
from workbench.finetune.job.finetune import FineTune

ROW = {
    "table_id": "1-1",
    "question": "Where?",
    "sql": {"sel": "Town", "agg": "", "conds": [["Year", "=", 1990]]},
}
INDEXED = {
    "table_id": "1-1",
    "question": "Where?",
    "sql": {"sel": 0, "agg": 3, "conds": [[1, 2, 1990]]},
}
TABLE = {
    "id": "1-1",
    "header": ["Town", "Year"],
    "types": ["text", "real"],
    "rows": [["Graz", 1990]],
}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def lines(path: Path | None) -> list[dict[str, object]]:
    assert path is not None
    return [json.loads(line) for line in path.read_text().splitlines()]


def release(path: Path, **changed: object) -> str:
    rows = {
        "train.jsonl": INDEXED,
        "train.tables.jsonl": TABLE,
        "dev.jsonl": {**INDEXED, "table_id": "2-2"},
        "dev.tables.jsonl": {**TABLE, "id": "2-2"},
        "test.jsonl": "never read",
        **changed,
    }
    with tarfile.open(path, "w:bz2") as tar:
        for name, row in rows.items():
            if row is not None:
                content = json.dumps(row).encode() + b"\n"
                info = tarfile.TarInfo(f"data/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return str(path)


def test_mini_is_the_same_each_time_and_shares_no_question(tmp_path: Path) -> None:
    first = prepare(dataset_from("wikisql-mini"), tmp_path / "a")
    second = prepare(
        dataset_from({"kind": "wikisql-mini", "train_rows": 100, "eval_rows": 400}), tmp_path / "b"
    )
    assert (first.train_rows, first.eval_rows, first.hub) == (4000, 400, None)
    assert len(lines(first.train)) == 4000
    assert lines(first.eval) == lines(second.eval)
    assert lines(first.train)[:100] == lines(second.train)
    assert not {r["source"] for r in lines(first.train)} & {r["source"] for r in lines(first.eval)}
    tables = {table.id for table in read_tables(tmp_path / "a" / "tables.jsonl")}
    assert {r["table_id"] for r in lines(first.train)} <= tables


def test_files_with_columns_by_name(tmp_path: Path) -> None:
    train, evaluation = write(tmp_path / "t.jsonl", ROW, ROW), write(tmp_path / "e.jsonl", ROW)
    made = prepare(
        dataset_from({"kind": "files", "train": train, "eval": evaluation}), tmp_path / "out"
    )
    assert (made.train_rows, made.eval_rows, made.tables) == (2, 1, None)
    assert lines(made.eval) == [
        {
            "source": "translate to SQL: Where?",
            "target": "SELECT Town FROM table WHERE Year = 1990",
            "table_id": "1-1",
        }
    ]


def test_a_prepared_folder_is_a_dataset_again(tmp_path: Path) -> None:
    first = prepare(Mini(train_rows=20, eval_rows=5), str(tmp_path / "a"))
    second = prepare(dataset_from(str(tmp_path / "a")), tmp_path / "b")
    for name in ("train", "eval", "tables"):
        assert lines(getattr(first, name)) == lines(getattr(second, name))


def test_the_releases_files_unpacked_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", INDEXED)
    write(tmp_path / "dev.jsonl", INDEXED)
    write(tmp_path / "train.tables.jsonl", TABLE)
    write(tmp_path / "dev.tables.jsonl", TABLE)
    made = prepare(dataset_from(str(tmp_path)), tmp_path / "out")
    assert lines(made.train)[0]["target"] == "SELECT COUNT Town FROM table WHERE Year < 1990"
    assert lines(made.tables)[0] == {**TABLE, "name": ""}


def test_the_original_release(tmp_path: Path) -> None:
    path = release(tmp_path / "data.tar.bz2")
    assert dataset_from(path) == Release(path=path)
    made = prepare(dataset_from({"kind": "release", "path": path}), tmp_path / "out")
    assert (made.train_rows, made.eval_rows) == (1, 1)
    assert [t["id"] for t in lines(made.tables)] == ["2-2"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "eval.jsonl",
        "tables.jsonl",
        "train.jsonl",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"dev.tables.jsonl": None},
            sentence("has no {}; the release of WikiSQL has", "dev.tables.jsonl"),
        ),
        (
            {"dev.jsonl": {**INDEXED, "table_id": "9-9"}},
            sentence("table_id {} is not in the tables file", "dev.jsonl, line 1", "9-9"),
        ),
        (
            {"train.tables.jsonl": {**TABLE, "rows": [[1]]}},
            r"train.tables.jsonl, line 1: rows\[0\]",
        ),
    ],
)
def test_a_broken_release(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(Release(path=release(tmp_path / "data.tar.bz2", **changed)), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_refused_dataset_leaves_the_earlier_one(tmp_path: Path) -> None:
    made = prepare(Mini(train_rows=5, eval_rows=2), tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    good, bad = (
        write(tmp_path / "t.jsonl", ROW),
        write(tmp_path / "e.jsonl", ROW, {**ROW, "sql": 1}),
    )
    with pytest.raises(
        ConfigError,
        match=sentence("is {}; it must be an object", "e.jsonl, line 2", "sql", 1),
    ):
        prepare(RowFiles(train=good, eval=bad), tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    replaced = prepare(RowFiles(train=good, eval=good), tmp_path / "out")
    assert replaced.tables is None, "the tables of another dataset must not stay"
    assert made.train == replaced.train


def test_rows_of_text_and_a_model_that_cannot_learn_from_all_of_them(tmp_path: Path) -> None:
    asks, plain = (
        {"instruction": "Sort.", "input": "3 1\n2", "output": "1 2 3"},
        {"text": "Once\nupon a time"},
    )
    files = RowFiles(
        train=write(tmp_path / "t.jsonl", asks, plain), eval=write(tmp_path / "e.jsonl", asks)
    )
    made = prepare(files, tmp_path / "out")
    assert lines(made.train) == [
        {"source": "Sort.", "input": "3 1\n2", "target": "1 2 3", "table_id": None},
        {"source": "", "target": "Once\nupon a time", "table_id": None},
    ]
    with pytest.raises(
        ConfigError,
        match=sentence("such as 'tiny-llama'", "t.jsonl, line 2 is plain text"),
    ):
        prepare(files, tmp_path / "out", refusal=row_refusal(FineTune(model="tiny-t5")))


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("\n\n")
    with pytest.raises(
        ConfigError,
        match=sentence("the dataset file {} has no row; write at least 1 row", "e.jsonl"),
    ):
        prepare(
            RowFiles(train=write(tmp_path / "t.jsonl", ROW), eval=str(tmp_path / "e.jsonl")),
            tmp_path / "out",
        )


def test_hub_prepares_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = prepare(dataset_from("wikisql"), tmp_path / "out")
    assert (made.train, made.eval, made.tables, made.train_rows) == (None, None, None, 0)
    assert made.hub == Hub(name="Salesforce/wikisql", revision="refs/convert/parquet").model_dump()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rwos.csv", sentence("a relative path counts from the current folder", "rwos.csv")),
        ("wikisql-mni", sentence(": did you mean '{}'?", "wikisql-mini")),
        (
            "/no/such/folder",
            sentence("a relative path counts from the current folder", "/no/such/folder"),
        ),
        (
            {"kind": "jsn"},
            sentence(
                "is not known",
                "dataset kind 'jsn'",
                "wikisql-mini, files, release, hub, mix",
            ),
        ),
        ({}, sentence("is not known", "dataset kind None")),
        ({"kind": ["files"]}, sentence("is not known", "dataset kind")),
        (
            {"kind": "files", "trian": "x"},
            sentence("option {} is not known", "dataset", "trian", "train")
            + sentence(": did you mean '{}'?"),
        ),
        (
            {"kind": "files", "eval": "x"},
            sentence("needs the option", "dataset of kind 'files'", "train"),
        ),
        (
            {"kind": "files", "train": "x", "eval": 5},
            sentence("it must be", "dataset eval is 5", "text"),
        ),
        (
            {"kind": "files", "train": "x", "eval": "y"},
            sentence("dataset {}: there is no file {}{}; paths count from", "train", "x"),
        ),
        ({"kind": "files", "train": "x", "eval": "y", "tables": 7}, "dataset tables is 7"),
        (
            {"kind": "release", "path": "gone.tar.bz2"},
            sentence("dataset path: there is no file {}; paths count from", "gone.tar.bz2"),
        ),
        ({"kind": "release"}, sentence("needs the option", "path")),
        ({"kind": "hub"}, sentence("needs the option", "name")),
        ({"kind": "hub", "name": ""}, "dataset name is ''"),
        (
            {"kind": "wikisql-mini", "train_rows": 0},
            sentence("it must be", "dataset train_rows is 0")
            + sentence("a whole number, 1 or more"),
        ),
        ({"kind": "wikisql-mini", "seed": "7"}, "dataset seed is '7'"),
        (
            {"kind": "wikisql-mini", "train_rows": 10**6},
            sentence("dataset train_rows + eval_rows is more than the", 100000),
        ),
        (5, sentence("dataset is {}; give a name, a path or an object with 'kind'", 5)),
    ],
)
def test_what_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset_from(value)  # type: ignore[arg-type]


def test_the_real_rows(tmp_path: Path, shared_data: Path) -> None:
    made = prepare(dataset_from(str(shared_data)), tmp_path / "out")
    assert made.train_rows == 15_927
    assert len(lines(made.train)) == 15_927


def test_a_row_with_anything_in_any_place_is_taken_or_refused_in_words(tmp_path: Path) -> None:
    table = {"id": "1-1", "header": ["a"], "types": ["real"], "rows": [["5"]]}
    sql = {"sel": 0, "agg": 0, "conds": [[0, 0, "5"]]}
    bases = (
        {"source": "q", "target": "a"},
        {"question": "who", "table_id": "1-1", "sql": sql},
        table,
    )
    tried = refused = 0
    for base in bases:
        for at in places(base):
            for wrong in WRONG:
                changed = replaced(base, at, wrong)
                row, its_table = (bases[1], changed) if base is table else (changed, table)
                for name, value in (("train", row), ("eval", row), ("tables", its_table)):
                    (tmp_path / f"{name}.jsonl").write_text(json.dumps(value) + "\n")
                tried += 1
                try:
                    prepare(dataset_from(str(tmp_path)), tmp_path / "out")
                except ConfigError as error:
                    assert "line 1" in str(error) or "row" in str(error)
                    refused += 1
    assert tried > 300
    assert refused > tried / 2


@pytest.mark.parametrize(
    "dataset",
    [
        {"kind": "wikisql-mini", "train_row": 3},
        {"kind": "wikisql-mini", "train_rows": "x"},
        {"kind": "wikisql-min"},
        {"kind": "mix", "parts": [{"dataset": {"kind": "wikisql-mini", "train_row": 3}}]},
    ],
)
def test_an_object_that_is_no_dataset_is_refused_when_the_job_is_made(
    dataset: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match=r"train_row|wikisql-min"):
        FineTune(dataset=dataset)


def test_making_a_job_opens_none_of_its_files() -> None:
    dataset = {"kind": "files", "train": "nowhere.csv"}
    assert FineTune(dataset=dataset).dataset == dataset
