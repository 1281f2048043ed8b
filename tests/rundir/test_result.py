"""A run's result as others read it: the words for a fault, the model."""

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
    assert result(tmp_path, **facts, of_kind={"peft": "none"}).trained == "tiny-t5 ddp bf16"
    assert result(tmp_path, **facts, of_kind={"peft": "lora"}).trained == "tiny-t5 ddp lora bf16"


def test_a_result_is_read_as_it_was_written_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    made = result(tmp_path, model="tiny-t5", steps=3)
    with pytest.raises(RunError, match=sentence("or the path is not a run directory")):
        ResultRecord.load(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(made.to_dict()))
    assert ResultRecord.load(tmp_path) == made
    (tmp_path / "result.json").write_text('{"state": "unheard of"}')
    with pytest.raises(RunError, match=sentence("has no valid state of the run")):
        ResultRecord.load(tmp_path)
