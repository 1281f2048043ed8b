"""Forecasts of a benchmark's rows, by figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.base.errors import WorkbenchError
from workbench.benchmark.forecast import (
    BenchmarkForecast,
    ForecastRow,
    MemoryForecast,
    forecast_memory,
)


def forecast(*rows: ForecastRow) -> BenchmarkForecast:
    return BenchmarkForecast(name="b", rows=rows)


def row(*, runs: int, finished: int = 0, refusal: str = "") -> ForecastRow:
    return ForecastRow(
        name="r", runs=runs, finished=finished, memory=MemoryForecast(refusal=refusal)
    )


def test_runs_that_are_finished_or_skipped_are_not_to_go() -> None:
    found = forecast(row(runs=3, finished=1), row(runs=4), row(runs=2, refusal="too large"))
    assert (found.runs, found.to_go) == (9, 6)


class Job:
    """A job that asks for memory as its test says, and keeps the number of pods."""

    kind = "finetune"

    def __init__(self, need: Any) -> None:
        self.views = self
        self.need = need
        self.asked: list[tuple[int, int]] = []

    def forecast(self, *, pods: int, gpus: int, ranks: int) -> Any:
        assert ranks == 0
        self.asked.append((pods, gpus))
        return None if self.need is None else SimpleNamespace(memory=self.memory)

    def memory(self) -> Any:
        if isinstance(self.need, str):
            raise WorkbenchError(self.need)
        pod_gpu_gib, gpu_gib, host_gib = self.need
        return SimpleNamespace(pod_gpu_gib=pod_gpu_gib, gpu_gib=gpu_gib, host_gib=host_gib)


def spec(job: Job, *, pods: int | None = None) -> Any:
    cluster = SimpleNamespace(
        count=3, pods=SimpleNamespace(gpus=2, ranks=0), pod_memory_gib=lambda number: 12.0 / number
    )
    return SimpleNamespace(job=job, cluster=cluster, pods=pods)


def test_a_row_is_forecast_for_its_own_pods_else_for_all_of_the_cluster() -> None:
    job = Job((None, None, 1.0))
    for pods in (None, 2):
        forecast_memory(spec(job, pods=pods))
    assert job.asked == [(3, 2), (2, 2)]


@pytest.mark.parametrize(
    ("need", "gib", "lacks"),
    [
        # Memory of both GPUs, of one GPU, and of the pod. A pod has 4 GiB, and a GPU 8.
        ((16.0, 8.0, 4.0), 16.0, []),
        ((16.2, 8.1, 4.0), 16.2, ["8.10 GiB of each GPU"]),
        ((16.0, 8.0, 4.1), 16.0, ["4.10 GiB of each pod"]),
        ((18.0, 9.0, 5.0), 18.0, ["9.00 GiB of each GPU", "5.00 GiB of each pod"]),
        ((None, None, 3.0), 3.0, []),
        ((None, None, None), None, []),
    ],
)
def test_a_row_that_needs_more_than_there_is_is_refused_for_each_place(
    need: Any, gib: float | None, lacks: Sequence[str]
) -> None:
    found = forecast_memory(spec(Job(need)), gpu_memory_gib=8.0)
    assert found.gib == gib and found.unknown == ""
    assert bool(found.refusal) == bool(lacks)
    assert found.refusal.count("predicted") == len(lacks)
    assert all(lack in found.refusal for lack in lacks)


def test_a_row_without_a_forecast_is_not_refused() -> None:
    for need, why in ((None, "a finetune job"), ("no such kernel", "no such kernel")):
        found = forecast_memory(spec(Job(need)))
        assert (found.gib, found.refusal) == (None, "") and why in found.unknown
