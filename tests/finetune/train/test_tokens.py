"""Rows as tokens in a file, as given or packed."""

from __future__ import annotations

from pathlib import Path

from workbench.finetune.data.training.tokens import TokenRows, packed

ROWS = [{"input_ids": list(range(n + 1)), "labels": [-100] * n + [70_000 + n]} for n in range(5)]


def test_rows_come_back_as_they_went_in_with_their_lengths(tmp_path: Path) -> None:

    rows = TokenRows(ROWS, tmp_path)
    assert list(rows) == ROWS and len(rows) == 5
    assert rows.lengths.tolist() == [[n + 1, n + 1] for n in range(5)]
    assert list(tmp_path.iterdir()) == [], "what a killed rank leaves is nothing"
    together = list(packed(ROWS, 6))
    assert list(TokenRows(packed(ROWS, 6), tmp_path)) == together and "position_ids" in together[0]
    assert not TokenRows([], tmp_path)
