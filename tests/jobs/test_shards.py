"""A dataset of many files is one list of rows: the cuts between the files change nothing."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import Table, parquet

from workbench.base.errors import ConfigError
from workbench.finetune.data.sources.dataset import dataset_from, prepare

Row = dict[str, str]
ROWS: Sequence[Row] = [{"source": f"question {n}", "target": f"answer {n}"} for n in range(30)]


def write_shard(path: Path, rows: Sequence[Row]) -> None:
    """Write a shard in the format of its name."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        parquet.write_table(Table.from_pylist(list(rows)), path)
    else:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def prepared(train: object, folder: Path) -> tuple[bytes, bytes, int, int]:
    """Return the rows to train and to evaluate as a job has them, and their numbers."""
    dataset = dataset_from({"kind": "files", "train": train, "eval_share": 0.1})
    made = prepare(dataset, folder)
    assert made.train is not None
    assert made.eval is not None
    return made.train.read_bytes(), made.eval.read_bytes(), made.train_rows, made.eval_rows


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, len(ROWS)), max_size=8),
    ends=st.lists(st.sampled_from(["jsonl", "jsonl.gz", "parquet"]), min_size=9, max_size=9),
)
def test_any_split_into_shards_is_the_same_run(cuts: list[int], ends: list[str]) -> None:
    borders = sorted({0, *cuts, len(ROWS)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = folder / "whole.jsonl"
        write_shard(whole, ROWS)
        shards = []
        for number, (first, end) in enumerate(pairwise(borders)):
            shards.append(folder / f"part-{number:02}.{ends[number]}")
            write_shard(shards[-1], ROWS[first:end])
        made = prepared([str(shard) for shard in shards], folder / "of-shards")
        assert made == prepared(str(whole), folder / "of-whole")
        assert made[2] + made[3] == len(ROWS)
        assert made[0].count(b"\n") == made[2]


def test_a_glob_reads_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_shard(tmp_path / "whole.jsonl", [*ROWS[20:], *ROWS[:10], *ROWS[10:20]])
    # "10" stands before "2": names are compared as text.
    for name, first in (("part-2", 10), ("part-11", 0), ("part-10", 20)):
        write_shard(tmp_path / f"{name}.jsonl", ROWS[first : first + 10])
    made = prepared(str(tmp_path / "part-*.jsonl"), tmp_path / "of-glob")
    assert made == prepared(str(tmp_path / "whole.jsonl"), tmp_path / "of-whole")


@pytest.mark.parametrize("number", [0, 3, 6])
@pytest.mark.parametrize(
    ("last", "words"),
    [
        ('{"source": "cut off', "line 5"),
        ('{"unknown": "a", "columns": "b"}', "line 5"),
        ("[1, 2]", "line 5"),
    ],
    ids=["broken", "other columns", "no object"],
)
def test_a_bad_row_is_named_with_shard_and_line(
    tmp_path: Path, number: int, last: str, words: str
) -> None:
    for shard in range(7):
        write_shard(tmp_path / f"part-{shard}.jsonl", ROWS[4 * shard : 4 * shard + 4])
    bad = tmp_path / f"part-{number}.jsonl"
    bad.write_text(bad.read_text() + last)
    with pytest.raises(ConfigError, match=words) as refused:
        prepared(str(tmp_path / "part-*.jsonl"), tmp_path / "out")
    assert bad.name in str(refused.value)


@pytest.mark.parametrize("content", [b"PK\x03\x04 no rows", b"\x1f\x8b broken"])
def test_a_shard_of_another_content_is_named(tmp_path: Path, content: bytes) -> None:
    write_shard(tmp_path / "part-0.jsonl.gz", ROWS)
    (tmp_path / "part-1.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigError, match=r"part-1\.jsonl\.gz"):
        prepared(str(tmp_path / "part-*"), tmp_path / "out")


@pytest.mark.parametrize("end", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_empty_shard_is_refused_by_its_name(tmp_path: Path, number: int, end: str) -> None:
    for shard in range(3):
        write_shard(tmp_path / f"part-{shard}.{end}", [] if shard == number else ROWS)
    with pytest.raises(ConfigError, match=rf"part-{number}\.{end} is empty"):
        prepared(str(tmp_path / "part-*"), tmp_path / "out")


def test_a_table_without_rows_is_refused_by_its_name(tmp_path: Path) -> None:
    write_shard(tmp_path / "part-0.parquet", ROWS)
    parquet.write_table(Table.from_pylist(list(ROWS)).slice(0, 0), tmp_path / "part-1.parquet")
    with pytest.raises(ConfigError, match=r"part-1\.parquet has no row"):
        prepared(str(tmp_path / "part-*"), tmp_path / "out")
