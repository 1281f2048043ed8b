"""Rows in memory become a file that a job names; what JSON has not is refused by its column."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import datasets
import numpy
import pandas
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench import FineTune, preview
from workbench.base.errors import ConfigError
from workbench.finetune.options.rows_in_memory import with_files

ROWS = [{"source": "a  b", "target": "x y"}, {"source": "ç", "target": "y"}] * 4
_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def rows_of(dataset: object) -> list[object]:
    """Return the rows in the file of a dataset."""
    lines = Path(str(dataset)).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        pandas.DataFrame(ROWS),
        datasets.Dataset.from_list(ROWS),
        pyarrow.Table.from_pylist(ROWS),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_every_table_of_the_same_rows_is_the_same_job(rows: object) -> None:
    job = FineTune("tiny-t5", rows, max_steps=1)
    assert job == FineTune("tiny-t5", ROWS, max_steps=1)
    assert rows_of(job.dataset) == ROWS
    assert FineTune.from_dict(job.to_dict()) == job


@given(st.lists(st.dictionaries(_TEXT, _VALUES, max_size=3), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_a_row_is_written_as_it_is(rows: list[dict[str, object]]) -> None:
    assert rows_of(with_files(rows)) == rows


def test_empty_cells_and_types_of_numpy_become_those_of_json() -> None:
    frame = pandas.DataFrame(
        {
            "source": ["a", None],
            "number": [1.5, numpy.nan],
            "whole": pandas.array([1, None], dtype="Int64"),
            "day": pandas.to_datetime(["2026-01-02", None]),
        }
    )
    first = {"source": "a", "number": 1.5, "whole": 1, "day": "2026-01-02T00:00:00"}
    assert rows_of(with_files(frame)) == [first, dict.fromkeys(first)]
    rows = [{"n": numpy.int64(3), "v": numpy.ones(2), "d": date(2026, 1, 2), "t": (1, 2)}]
    assert rows_of(with_files(rows)) == [{"n": 3, "v": [1.0, 1.0], "d": "2026-01-02", "t": [1, 2]}]


def test_rows_may_stand_in_an_object_a_mix_and_a_dict_of_parts() -> None:
    frame = pandas.DataFrame({"Question ": ["a"] * 4, "Answer": ["b"] * 4})
    columns = {"source": "Question ", "target": "Answer"}
    files = with_files({"kind": "files", "train": frame, "eval": frame, "columns": columns})
    assert isinstance(files, dict)
    assert files["train"] == files["eval"] == with_files(frame)
    mix = with_files({"kind": "mix", "parts": [{"dataset": ROWS, "weight": 2}, "wikisql-mini"]})
    part = {"dataset": with_files(ROWS), "weight": 2}
    assert mix == {"kind": "mix", "parts": [part, "wikisql-mini"]}
    table = datasets.Dataset.from_list(ROWS)
    parts = with_files(datasets.DatasetDict(train=table, validation=table))
    assert parts == {"kind": "files", "train": with_files(ROWS), "eval": with_files(ROWS)}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([5], "row 0 is of type int; a row is a dict"),
        (["text"], "a name, a path, rows"),
        ([{"a": b"bytes"}], "row 0, column 'a' has a value of type bytes"),
        ([{"a": "x"}, {"a": {"b": object()}}], "row 1, column 'a'"),
        ([{"a": float("inf")}], "row 0, column 'a'"),
        ([{1: "x"}], "column 1 has no text as its name"),
        (pandas.DataFrame([[1, 2]], columns=["a", "a"]), "two columns of one name"),
        (pandas.DataFrame({"a": ["x"]}).set_index("a"), "the index 'a', which is no column"),
        (
            datasets.DatasetDict(
                validation=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)
            ),
            "the parts 'validation', 'test'",
        ),
        (datasets.DatasetDict(other=datasets.Dataset.from_list(ROWS)), "the parts 'other'"),
    ],
)
def test_other_values_are_refused_with_what_to_do(cache: Path, rows: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FineTune("tiny-t5", rows)
    assert not list(cache.rglob("*.jsonl"))


def test_model_and_dataset_need_no_name_and_all_else_does() -> None:
    assert FineTune("tiny-llama", "wikisql-mini") == FineTune(model="tiny-llama")
    names = list(inspect.signature(FineTune).parameters)
    assert names[:2] == ["model", "dataset"]
    with pytest.raises(ConfigError, match="two values for 'model'"):
        FineTune("tiny-t5", model="tiny-llama")
    with pytest.raises(ConfigError, match="all other options by name; 'zero1' has no name"):
        FineTune("tiny-t5", "wikisql-mini", "zero1")


def test_a_preview_reads_the_rows_in_memory() -> None:
    rows = [{"source": f"question {n}", "target": f"answer {n}"} for n in range(8)]
    assert "question 0" in str(preview(FineTune("tiny-t5", rows)))


def test_files_unused_for_a_month_are_removed_when_rows_are_written(cache: Path) -> None:
    month_s = 30 * 24 * 3600
    used, unused = (Path(str(with_files([{"source": "a", "target": to}]))) for to in "xy")
    for path in (used, unused):
        os.utime(path, (0, time.time() - month_s - 60))
    # A job of the same rows counts as a use.
    assert with_files([{"source": "a", "target": "x"}]) == str(used)
    assert unused.exists()
    new = Path(str(with_files([{"source": "a", "target": "z"}])))
    assert {*(cache / "deepspeed-workbench" / "rows").iterdir()} == {used, new}
