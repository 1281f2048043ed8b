"""Rows as tokens in a file: every rank gets all, in their order, each made by one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.tokens import TokenRows, packed, shared_rows

ROWS = [{"input_ids": list(range(n + 1)), "labels": [-100] * n + [70_000 + n]} for n in range(5)]


def test_rows_come_back_as_they_went_in_with_their_lengths(tmp_path: Path) -> None:

    rows = TokenRows(ROWS, tmp_path)
    assert list(rows) == ROWS and len(rows) == 5
    assert rows.lengths.tolist() == [[n + 1, n + 1] for n in range(5)]
    assert list(tmp_path.iterdir()) == [], "what a killed rank leaves is nothing"
    together = list(packed(ROWS, 6))
    assert list(TokenRows(packed(ROWS, 6), tmp_path)) == together and "position_ids" in together[0]
    assert not TokenRows([], tmp_path)


def _rank(rank: int, store: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    examples = [Example(source=str(n), target="") for n in range(5000)]
    made = []

    def make(some: list[Example], first: int) -> list[dict[str, list[int]]]:
        made.extend(some)
        assert not some or some[0].source == str(first - 1)
        # An example may become several rows.
        return [{"input_ids": [int(e.source)] * n, "labels": [n]} for e in some for n in (1, 2)]

    rows = list(TokenRows(shared_rows(examples, make), Path(folder)))
    assert [row["input_ids"] for row in rows] == [
        [n] * times for n in range(5000) for times in (1, 2)
    ]
    count = torch.tensor([len(made)])
    torch.distributed.all_reduce(count)
    assert count.item() == len(examples) and len(made) < len(examples)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_each_row_is_made_by_one_rank_and_all_get_it(tmp_path: Path) -> None:
    args = [str(tmp_path / "store"), str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), *args], env=env) for rank in range(2)
    ]
    assert [rank.wait(600) for rank in ranks] == [0, 0]


if __name__ == "__main__":
    _rank(int(sys.argv[1]), *sys.argv[2:])
