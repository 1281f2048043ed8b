from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from workbench.worker.rank.records import is_echo, memory, write_done, write_error  # torch first


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


@pytest.mark.parametrize(
    ("message", "echo"),
    [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.2]:31337", True),
        ("[enforce fail] Read error [127.0.0.1]:1 Connection reset by peer", True),
        ("NCCL Error 6: remote process exited or there was a network error", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("loss is nan on rank 1 at step 3", False),
    ],
)
def test_a_lost_peer_is_told_from_a_cause(message: str, echo: bool) -> None:
    assert is_echo(message) is echo


def test_memory_is_this_process_s() -> None:
    before = memory()["rss_gib"]
    held = bytearray(b"x") * (256 * 1024 * 1024)
    after = memory()
    assert 0.2 < after["rss_gib"] - before < 0.35
    assert after["peak_rss_gib"] >= after["rss_gib"] > 0
    del held
