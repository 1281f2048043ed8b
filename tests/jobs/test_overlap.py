"""Evaluation rows that are training rows too are counted alike for files and for loaded rows."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.examplefolder import example_folder
from workbench.finetune.data.overlap import overlap_of_files, overlap_of_rows
from workbench.finetune.data.rows import Example

ROWS = st.lists(
    st.builds(Example, source=st.sampled_from("abc"), target=st.sampled_from("xyz")), max_size=8
)


@given(ROWS, ROWS)
def test_every_evaluation_row_that_is_trained_on_counts_once(
    train: list[Example], evaluation: list[Example]
) -> None:
    pairs = {(row.source, row.target) for row in train}
    expected = sum((row.source, row.target) in pairs for row in evaluation)
    assert overlap_of_rows(train, evaluation) == expected
    with example_folder() as folder:
        paths = Path(folder, "train.jsonl"), Path(folder, "eval.jsonl")
        for path, rows in zip(paths, (train, evaluation), strict=True):
            path.write_text("".join(row.to_json() + "\n" for row in rows))
        assert overlap_of_files(*paths) == expected
