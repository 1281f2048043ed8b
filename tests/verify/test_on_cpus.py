"""`workbench verify` for real, on two local pods: the cheap rows, and a limit that ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.long]

TRIED = ("all-reduce", "ddp", "warm-start", "tf32")


def test_the_cheap_rows_hold_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    only = [word for name in TRIED for word in ("--only", name)]
    code = main(["verify", *only, "--json", str(table), "--out", str(tmp_path / "runs")])
    shown = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(table.read_text())["rows"]}
    assert code == 0, shown.out
    assert [*rows] == ["all-reduce", "ddp", "tf32", "warm-start"]
    held = {name for name, row in rows.items() if row["verdict"] == "held"}
    assert held == set(TRIED) - {"tf32"}
    assert rows["all-reduce"]["ran_on"].startswith("2 ranks on CPU")
    assert "gloo" in rows["all-reduce"]["detail"]
    assert rows["ddp"]["ran_on"].startswith("1, 2 ranks on CPU")
    assert "forked" in rows["warm-start"]["detail"]
    assert rows["tf32"]["detail"] == "no CUDA device on the pods"
    # The table alone is on standard output.
    assert shown.out.startswith("name ") and "starting" not in shown.out
    assert "[1/4] all-reduce" in shown.err and "2 ranks on CPU" in shown.err
