"""A run's result as others read it: the words for a fault, the model, the predicted memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import RunError
from workbench.rundir.result import ResultRecord, RunFault
from workbench.rundir.state import RunState


def result(path: Path, **facts: Any) -> ResultRecord:
    return ResultRecord(path=path, state=RunState.FAILED, **facts)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({"host": "10.0.0.2", "pod": "pod-1", "rank": 0}, "rank 0 on pod-1 (10.0.0.2)"),
        ({"host": "10.0.0.2", "pod": "pod-1"}, "pod-1"),
        ({}, "the run"),
    ],
)
def test_a_fault_names_its_rank_else_its_pod_else_the_run(
    where: dict[str, Any], named: str
) -> None:
    assert str(RunFault(**where, kind="ValueError", message="bad row")) == (
        f"{named}: ValueError: bad row"
    )


def test_a_fault_ends_with_the_other_ranks_and_the_traceback() -> None:
    fault = RunFault(kind="exit", message="1", others="also rank 2: exit 1", traceback="Trace\n")
    assert str(fault).splitlines()[1:] == ["also rank 2: exit 1", "Trace"]


def test_what_was_trained_is_named_without_adapters_that_there_are_not(tmp_path: Path) -> None:
    facts = {"model": "tiny-t5", "technique": "ddp", "precision": "bf16"}
    assert result(tmp_path, **facts, peft="none").trained == "tiny-t5 ddp bf16"
    assert result(tmp_path, **facts, peft="lora").trained == "tiny-t5 ddp lora bf16"


@pytest.mark.parametrize(
    ("kind", "measured", "predicted"),
    [
        # GPUs of a run that reports CUDA memory, or that failed before it reported any.
        ("cuda", {"10.0.0.2": 3.0}, 8.0),
        ("resident", {}, 8.0),
        ("resident", {"10.0.0.2": 3.0}, 2.0),
    ],
)
def test_the_predicted_memory_is_of_the_place_that_was_measured(
    tmp_path: Path, kind: str, measured: dict[str, float], predicted: float
) -> None:
    made = result(tmp_path, memory_kind=kind, peak_memory_gib=measured)
    assert made.predicted_memory_gib is None
    file = tmp_path / "prediction.json"
    file.write_text(json.dumps({"pod_gpu_gib": 8.0, "host_gib": 2.0}))
    assert made.predicted_memory_gib == predicted
    file.write_text(json.dumps({"pod_gpu_gib": None, "host_gib": 2.0}))
    assert made.predicted_memory_gib == 2.0


def test_a_result_is_read_as_it_was_written_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    made = result(tmp_path, model="tiny-t5", steps=3)
    with pytest.raises(RunError, match=sentence("rundir.result.load.holds-result-json")):
        ResultRecord.load(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(made.to_dict()))
    assert ResultRecord.load(tmp_path) == made
    (tmp_path / "result.json").write_text('{"state": "unheard of"}')
    with pytest.raises(RunError, match=sentence("rundir.result._read_at.does-say-state")):
        ResultRecord.load(tmp_path)
