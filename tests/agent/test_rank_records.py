"""What a rank leaves for its agent: errors, memory, processor and phases. No process."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.agent import machine
from workbench.agent.rank import collectives, phases
from workbench.agent.rank import records as rank_records
from workbench.agent.rank.records import EndedWithAnother, cores, device, memory
from workbench.agent.ranks.records import read_record

GIB = 1024**3


@pytest.mark.parametrize(
    ("error", "message", "echo"),
    [
        (ValueError("bad"), "bad", False),
        (RuntimeError(), "RuntimeError", False),
        (EndedWithAnother("rank 1 failed"), "rank 1 failed", True),
        (RuntimeError("ncclRemoteError"), "ncclRemoteError", True),
    ],
)
def test_an_error_is_left_with_its_traceback(
    tmp_path: Path, error: Exception, message: str, echo: bool
) -> None:
    try:
        raise error
    except Exception as caught:
        rank_records.write_error(tmp_path, 3, caught)
    record: Any = read_record(tmp_path / "error.json")
    assert (record["rank"], record["kind"]) == (3, type(error).__name__)
    assert (record["message"], record["echo"]) == (message, echo)
    assert "test_an_error_is_left_with_its_traceback" in record["traceback"] and record["host"]


def test_a_rank_that_is_done_says_so(tmp_path: Path) -> None:
    rank_records.write_done(tmp_path, 3)
    assert (read_record(tmp_path / "done.json") or {})["rank"] == 3


@pytest.mark.parametrize("gpus", [0, 2])
def test_memory_is_in_gib_and_that_of_the_fullest_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.setattr(machine, "memory", lambda _: (GIB // 3, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: (gpu + 1) * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda gpu: (4 - gpu) * GIB)
    on_gpu = {"cuda_allocated_gib": 2.0, "cuda_reserved_gib": 4.0} if gpus else {}
    assert memory() == {"rss_gib": 0.3333, "peak_rss_gib": 2.0, **on_gpu}


def test_a_gpu_is_named_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    assert device() == "H100"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor: 0\nmodel name\t: Xeon 8 \nmodel name: other\n", "Xeon 8"),
        ("model name\t: \n", "machine"),
        ("processor: 0\n", "machine"),
        (None, "machine"),
    ],
)
def test_a_cpu_is_named_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "machine")
    monkeypatch.setattr(rank_records, "Path", lambda _: tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert device() == name


@pytest.mark.parametrize(
    ("allowed", "text"),
    [({0, 1, 2, 3, 8}, "0-3,8"), ({5}, "5"), ({1, 3, 4}, "1,3-4"), ({2, 0}, "0,2"), (set(), "")],
)
def test_allowed_cores_are_ranges(
    monkeypatch: pytest.MonkeyPatch, allowed: set[int], text: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed if pid == 0 else {99})
    assert cores() == text


@pytest.fixture
def reported(capfd: pytest.CaptureFixture[str]) -> Callable[[], list[tuple[int, int]]]:
    def read() -> list[tuple[int, int]]:
        lines = [line for line in capfd.readouterr().out.splitlines() if line]
        found = [json.loads(line.partition(" ")[2]) for line in lines]
        assert {event["name"] for event in found} <= {"predicting"}
        return [(event["done"], event["total"]) for event in found]

    return read


@pytest.mark.parametrize(("rank", "events"), [(0, [(2, 6), (4, 6)]), (1, [])])
def test_the_progress_of_a_phase_is_reported_once_a_second_by_rank_0(
    monkeypatch: pytest.MonkeyPatch,
    reported: Callable[[], list[tuple[int, int]]],
    rank: int,
    events: list[tuple[int, int]],
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(phases, "time", type("Clock", (), {"monotonic": lambda: now_s[0]}))
    monkeypatch.setattr(collectives, "rank", lambda: rank)
    items = []
    for item in phases.counted("abcdef", 6, "predicting"):
        items.append(item)
        now_s[0] += 0.5
    assert items == list("abcdef") and reported() == events
