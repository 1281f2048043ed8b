"""What a keeper takes from a notebook, and what it answers to anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.base.errors import RunError
from workbench.keeper.requests import Close, NewestCheckpoint, OfRun, Status, Submit, request_from


def test_each_request_becomes_its_record() -> None:
    assert request_from({"op": "status"}) == Status(op="status")
    assert request_from({"op": "close"}) == Close(op="close")
    assert request_from({"op": "stop", "run": "r"}) == OfRun(op="stop", run="r")
    submitted = request_from({"op": "dry", "run": "r", "path": "/x/r", "job": {"kind": "script"}, "pods": None})
    assert submitted == Submit(op="dry", run="r", path=Path("/x/r"), job={"kind": "script"})
    assert request_from({"op": "held", "path": "/x/r", "last_step": 4}) == NewestCheckpoint(
        op="held", path=Path("/x/r"), last_step=4
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"op": "fly"}, "the keeper does not know the request 'fly'"),
        ({}, "the keeper does not know the request None"),
        ({"op": "cancel"}, "the request 'cancel' cannot be read: run: Field required"),
        (
            {"op": "submit", "run": "r", "path": "/x", "job": {}, "pods": "many"},
            "the request 'submit' cannot be read: pods: ",
        ),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(message: dict[str, object], problem: str) -> None:
    with pytest.raises(RunError) as caught:
        request_from(message)
    assert problem in str(caught.value)
