from __future__ import annotations

import json
from pathlib import Path

from workbench.agent.rank.records import memory, write_done, write_error


def test_an_error_record_carries_the_traceback_of_the_place(tmp_path: Path) -> None:
    def breaks() -> None:
        raise ValueError("no such column")

    try:
        breaks()
    except ValueError as error:
        write_error(tmp_path / "rank-2", 2, error)
    record = json.loads((tmp_path / "rank-2" / "error.json").read_text())
    assert (record["rank"], record["kind"], record["message"], record["echo"]) == (
        2,
        "ValueError",
        "no such column",
        False,
    )
    assert "in breaks" in record["traceback"]
    assert [p.name for p in (tmp_path / "rank-2").iterdir()] == ["error.json"]


def test_a_done_record_says_which_rank(tmp_path: Path) -> None:
    write_done(tmp_path, 1)
    assert json.loads((tmp_path / "done.json").read_text())["rank"] == 1


def test_memory_is_this_process_s() -> None:
    before = memory()["rss_gib"]
    held = bytearray(b"x") * (256 * 1024 * 1024)
    after = memory()
    assert 0.2 < after["rss_gib"] - before < 0.35
    assert after["peak_rss_gib"] >= after["rss_gib"] > 0
    del held
