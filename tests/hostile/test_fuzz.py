"""Malformed bytes of other people leave an error in words, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.fuzz import Target, mutated, targets, tracebacks

SEED = 30


@pytest.mark.slow
def test_two_thousand_malformed_inputs_leave_no_traceback(tmp_path: Path) -> None:
    """Every run of CI tries the same; `tests.hostile.fuzz` tries others by hand."""
    assert tracebacks(tmp_path, 2_000, SEED) == (0, {})


def test_whole_inputs_are_read(tmp_path: Path) -> None:
    """Otherwise the fuzz would only try refusals."""
    refused = []
    for name, target in targets(tmp_path).items():
        for sample in target.samples:
            try:
                target.parse(sample)
            except target.errors as error:
                refused.append(f"{name}: {error}")
    # No run is at the path of the sample.
    assert [line for line in refused if not line.startswith("lab: ")] == []


def test_a_traceback_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    careless = Target((b'{"a": 1}',), lambda data: json.loads(data)["a"] + 1, ())
    monkeypatch.setattr("tests.hostile.fuzz.targets", lambda _root: {"careless": careless})
    number, examples = tracebacks(tmp_path, 50, SEED)
    assert number > 10
    assert all(place.startswith("careless: ") for place in examples)


def test_the_same_seed_makes_the_same_inputs() -> None:
    import random

    sample = b'{"a": [1, 2], "b": "c"}\n'
    first = [mutated(sample, random.Random(7)) for _ in range(3)]
    assert first[0] == first[1] == first[2] != sample
