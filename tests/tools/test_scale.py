"""The table of sizes in the docs is the output of `python -m tools.scale`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import scale
from workbench.finetune.plan.transfers import Transfer

COSTS = Path(__file__).parents[2] / "docs" / "costs.md"


def test_a_case_without_a_transfer_has_a_dash() -> None:
    moved = Transfer(what="checkpoint to this machine", size=96e9, here=96e9, pod=96e9)
    cells = scale.rows_of(scale.Case(name="8B", pods=1, gpus=4, transfers=[moved]))
    assert cells["checkpoint"] == "96 GB"
    assert cells["part of a rank"] == "24 GB"
    assert cells["checkpoint to this machine"].startswith("96 GB: 13 min ")
    assert cells["restart, a pod left out"] == "–"
    assert cells["link for a copy in a notice of 25 s"] == "31 Gbit/s"


@pytest.mark.slow
@pytest.mark.long
def test_the_docs_have_the_table_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main()
    table = COSTS.read_text(encoding="utf-8").partition("<!-- scale -->\n")[2]
    assert table.partition("<!-- end of scale -->")[0] == capsys.readouterr().out
