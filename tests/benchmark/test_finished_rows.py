"""Rows of a benchmark that an earlier kernel finished, found in their run directories."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.benchrows import make_row, write_row
from workbench.benchmark import finished_rows
from workbench.benchmark.finished_rows import FinishedRows, data_of, keep_rows, kept_rows
from workbench.benchmark.row import Outcome


def note(**other: Any) -> dict[str, Any]:
    return {"benchmark": {"key": "zero1-1", "repeat": 0, "code": "c1", **other}}


def write(root: Path, submitted_s: float | None, *, ended: str = "succeeded", **other: Any) -> Path:
    write_row(root, state=ended)
    info = {"id": root.name, "cluster": str(root), "submitted_s": submitted_s, **note(**other)}
    (root / "run.json").write_text(json.dumps(info))
    return root


def found(folder: Path, **other: Any) -> str | None:
    row = FinishedRows(folder).finished(note(**other))
    if row is None:
        return None
    assert row.from_disk and row.path is not None
    return row.path.name


def test_the_newest_row_of_equal_conditions_is_found(tmp_path: Path) -> None:
    assert found(tmp_path / "missing") is None
    write(tmp_path / "old", 5.0)
    write(tmp_path / "new", 7.0)
    write(tmp_path / "middle", 6.0)
    write(tmp_path / "without-time", None)
    assert found(tmp_path) == "new"
    write(tmp_path / "other-code", 9.0, code="c2")
    write(tmp_path / "other-repeat", 9.0, repeat=1)
    assert found(tmp_path) == "new"
    assert found(tmp_path, repeat=1) == "other-repeat"
    assert found(tmp_path, key="ddp-1") is None
    assert len(FinishedRows(tmp_path).rows()) == 6


def test_a_repeat_without_a_number_is_the_first(tmp_path: Path) -> None:
    write(tmp_path / "one", 5.0, repeat=None)
    assert found(tmp_path, repeat=None) == "one"


@pytest.mark.parametrize(("ended", "holds"), [("succeeded", True), ("failed", False)])
def test_a_row_that_failed_is_run_again(tmp_path: Path, ended: str, holds: bool) -> None:
    write(tmp_path / "run", 5.0, ended=ended)
    assert (found(tmp_path) == "run") is holds
    assert FinishedRows(tmp_path).live(note()) is None, "a row that ended is not waited for"


def test_a_run_outside_of_a_benchmark_is_no_row(tmp_path: Path) -> None:
    write_row(tmp_path / "run")
    assert FinishedRows(tmp_path).rows() == []


def test_kept_rows_are_replaced_by_key_and_repeat(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "b"
    assert kept_rows(folder) == []
    keep_rows(folder, [make_row("zero1", 1, 1.0), make_row("ddp", 1, 2.0)])
    keep_rows(folder, [make_row("zero1", 1, 3.0), make_row("zero1", 1, 4.0, repeat=1)])
    speeds = {(row.key, row.repeat): row.train_samples_per_s for row in kept_rows(folder)}
    assert speeds == {("zero1-1", 0): 3.0, ("ddp-1", 0): 2.0, ("zero1-1", 1): 4.0}
    keep_rows(folder, [make_row("zero1", 2, None, outcome=Outcome.SKIPPED)])
    assert len(kept_rows(folder)) == 4
    (folder / "benchmark.json").write_text('{"rows": [{"name": 3}]}')
    assert kept_rows(folder) == []


def test_a_small_file_is_known_by_its_content_and_a_large_file_by_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished_rows, "_WHOLE_BYTES", 4)
    file = tmp_path / "rows"
    files = [("train", file), ("eval", tmp_path / "missing")]
    job: Any = SimpleNamespace(views=SimpleNamespace(local_files=lambda: files))

    def written(content: str, times: tuple[int, int]) -> str:
        file.write_text(content)
        os.utime(file, times)
        mark = data_of(job)
        assert len(mark) == 16
        return mark

    assert written("abcd", (1, 1)) == written("abcd", (2, 2)) != written("abce", (1, 1))
    assert written("abcde", (1, 1)) == written("abcdf", (1, 1)) != written("abcde", (2, 2))
