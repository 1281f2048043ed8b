"""The cache of traces: an answer per arithmetic, and a lock for the machine. No process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.sentences import sentence
from workbench.base.errors import WorkbenchError
from workbench.finetune.plan import tracing
from workbench.finetune.plan.tracing import (
    cached_answer,
    cached_trace,
    remember,
    trace_of,
    trace_step,
)
from workbench.finetune.techniques.sizes import Moment, Parameters

LAYER = [[100, 1, 0, 1], [30, 0, 0, 0], [50, 0, 1, 1], [20, 0, 1, 0]]
SIZES = {"layers": [LAYER, LAYER], "rest": [[7, 1, 0, 0]]}
MOMENT = [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in a folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path / "home" / "cache"


def request(*arithmetic: str, **more: Any) -> dict[str, Any]:
    return {"config": {"model_type": "t5"}, "arithmetic": list(arithmetic), **more}


def answer(*arithmetic: str, **more: Any) -> dict[str, Any]:
    return {"points": {name: [MOMENT] for name in arithmetic}, "sizes": SIZES, **more}


class Child:
    """The tracing process: it notes what is asked, and answers as a traced model would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: Sequence[str] = ()) -> None:
        self.asked: list[list[str]] = []
        self._fails = fails
        monkeypatch.setattr(tracing, "replies", self.replies)

    def replies(self, _entry: object, *, request: Any, **_limits: Any) -> Any:
        names = request["arithmetic"]
        self.asked.append(names)
        failed = {name: "RuntimeError: no kernel" for name in names if name in self._fails}
        yield answer(*(name for name in names if name not in failed), failed=failed)


def test_only_what_is_not_cached_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    assert list(trace_step(request("fp32")).moments) == ["fp32"]
    assert list(trace_step(request("fp32", "bf16")).moments) == ["fp32", "bf16"]
    assert list(trace_step(request("bf16", "fp32")).moments) == ["bf16", "fp32"]
    assert child.asked == [["fp32"], ["bf16"]]


def test_an_arithmetic_that_failed_is_named_and_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Child(monkeypatch, fails=["fp16"])
    found = trace_step(request("fp16", "fp32"))
    assert list(found.moments) == ["fp32"] and found.failed == {"fp16": "RuntimeError: no kernel"}
    trace_step(request("fp16", "fp32"))
    assert child.asked == [["fp16", "fp32"], ["fp16"]]
    assert not trace_step(request("fp32")).failed


def test_a_model_that_cannot_be_traced_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise ValueError("unknown model type")

    monkeypatch.setattr(tracing, "replies", fail)
    with pytest.raises(
        WorkbenchError, match=sentence("the model cannot be traced", "unknown model type")
    ):
        trace_step(request("fp32"))


def test_an_answer_is_cached_for_its_request_and_its_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = request("fp32")
    assert cached_answer(asked) is None and cached_trace(asked) is None
    remember(asked, answer("fp32"))
    assert cached_answer(asked) == answer("fp32")
    found = cached_trace(asked)
    assert found is not None and found.moments == {"fp32": [Moment(*MOMENT)]}
    # The order of the keys does not matter; every value does.
    assert cached_answer(dict(reversed(asked.items()))) is not None
    assert cached_answer(request("fp32", source=8)) is None
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0")
    assert cached_answer(asked) is None


def test_a_package_that_is_missing_is_part_of_the_request_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    remember(request("fp32"), answer("fp32"))
    assert cached_trace(request("fp32")) is not None


@pytest.mark.parametrize("content", ["", "[]", '{"points": {}}', '{"points": 3, "sizes": {}}'])
def test_a_damaged_file_of_the_cache_is_no_answer(cache: Path, content: str) -> None:
    remember(request("fp32"), answer("fp32"))
    (file,) = cache.rglob("*.json")
    file.write_text(content)
    assert cached_trace(request("fp32")) is None


def test_every_arithmetic_has_its_own_file(cache: Path) -> None:
    kept = remember(request("fp32", "bf16", "fp16"), answer("fp32", "bf16"))
    assert list(kept) == ["fp32", "bf16"]
    assert [list(one["points"]) for one in kept.values()] == [["fp32"], ["bf16"]]
    assert len([*(cache / "deepspeed-workbench" / "traces").glob("*.json")]) == 2
    assert cached_trace(request("fp16")) is None


def test_without_a_folder_of_caches_the_home_has_the_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    remember(request("fp32"), answer("fp32"))
    assert [*(tmp_path / "user" / ".cache" / "deepspeed-workbench" / "traces").glob("*.json")]
    assert cached_trace(request("fp32")) is not None


def test_a_cache_that_cannot_be_written_costs_no_plan(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the folder")
    child = Child(monkeypatch)
    assert trace_step(request("fp32")).moments
    assert trace_step(request("fp32")).moments
    assert len(child.asked) == 2


def test_parameters_are_counted_by_kind() -> None:
    found = trace_of([answer("fp32")])
    assert found.layers[0] == found.layers[1]
    assert found.layers[0] == Parameters(
        frozen=30,
        trained=100,
        packed=70,
        largest=100,
        largest_packed=50,
        small={100: 1, 30: 1, 50: 1, 20: 1},
        matrices=150,
    )
    assert found.rest == Parameters(
        frozen=0, trained=7, packed=0, largest=7, largest_packed=0, small={7: 1}, matrices=0
    )
    assert trace_of([{**answer("fp32"), "sizes": {"layers": [], "rest": []}}]).rest.largest == 0


def test_answers_to_a_request_become_one_trace() -> None:
    pieces = {"piece_rows": 2.5, "row_tokens": 9}
    found = trace_of([answer("fp32", **pieces), answer("bf16", **pieces)])
    assert list(found.moments) == ["fp32", "bf16"]
    assert (found.piece_rows, found.row_tokens, found.gpus) == (2.5, 9, 1)
    assert found.part is None and found.unplaced == ""
    # An answer of an earlier version has no pieces.
    assert trace_of([answer("fp32")]).row_tokens == 0


def test_layers_over_gpus_are_a_trace_of_their_own() -> None:
    answers = []
    for name in ("fp32", "bf16"):
        answers.append(answer(name, part=answer(name, row_tokens=4), gpus=3, unplaced=""))
    found = trace_of(answers)
    assert found.gpus == 3 and found.part is not None
    assert list(found.part.moments) == ["fp32", "bf16"] and found.part.row_tokens == 4
    assert trace_of([answer("fp32", unplaced="too small")]).unplaced == "too small"
