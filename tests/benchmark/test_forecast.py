"""Forecasts of a benchmark's rows, by figures that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchrows import make_row
from workbench.base.errors import WorkbenchError
from workbench.benchmark.forecast import (
    BenchmarkForecast,
    ForecastRow,
    MemoryForecast,
    TimeForecast,
    forecast_memory,
    forecast_time,
)
from workbench.benchmark.row import BenchmarkRow


def ran(
    ranks: int,
    seconds: float | None,
    *,
    micro: int = 8,
    accumulation: int = 1,
    steps: int = 10,
    beside: float = 5.0,
    **other: Any,
) -> BenchmarkRow:
    """Make a finished row that trained for `seconds`, and took `beside` seconds more."""
    figures: dict[str, Any] = {
        "key": f"{ranks}-{micro}-{accumulation}-{steps}",
        "per_device_batch": micro,
        "accumulation": accumulation,
        "steps": steps,
        "train_runtime_s": seconds,
        "duration_s": None if seconds is None else seconds + beside,
        "spec": {"job": {"max_steps": steps}},
    }
    return make_row("zero1", ranks, None, **{**figures, **other})


def seconds(asked: BenchmarkRow, *before: BenchmarkRow) -> float | None:
    return forecast_time(asked, before).seconds


def test_accumulated_micro_batches_are_rows_of_a_step() -> None:
    # 0.1 s a row on one rank: 16 rows a step take 1.6 s.
    asked = ran(1, None, accumulation=2)
    assert seconds(asked, ran(1, 8.0)) == pytest.approx(5 + 10 * 1.6)
    assert seconds(asked, ran(1, 8.0, accumulation=None)) is None
    assert seconds(ran(1, None, micro=None), ran(1, 8.0)) is None


def test_a_forecast_for_one_rank_needs_no_other_ranks_and_has_no_network() -> None:
    asked = ran(1, None, micro=16)
    alone, several = ran(1, 8.0), ran(3, 15.0)
    assert seconds(asked, alone) == pytest.approx(5 + 10 * 1.6)
    assert seconds(asked, alone, several) == pytest.approx(5 + 10 * 1.6)
    # Two ranks exchange gradients, at a speed that only several ranks show.
    assert seconds(ran(2, None, micro=16), alone) is None
    assert seconds(ran(2, None, micro=16), several) is None
    # One rank computes 0.8 s a step, so the network of three ranks took 0.7 s.
    assert seconds(ran(2, None, micro=16), alone, several) == pytest.approx(5 + 10 * 2.3)


def test_a_network_that_took_no_time_makes_no_step_shorter_than_its_computation() -> None:
    quicker = ran(3, 6.0)
    assert seconds(ran(2, None, micro=16), ran(1, 8.0), quicker) == pytest.approx(5 + 10 * 1.6)
    # Clocks of two processes may differ: nothing takes less than no time.
    assert seconds(ran(1, None, micro=16), ran(1, 8.0, beside=-1.0)) == pytest.approx(10 * 1.6)


def test_the_same_row_measured_before_decides_alone() -> None:
    asked = ran(1, None)
    slow, quick = ran(1, 8.0, duration_s=99.0), ran(1, 8.0, duration_s=33.0)
    found = forecast_time(asked, [slow, quick, ran(1, 8.0, duration_s=None), ran(2, 8.0)])
    assert (found.seconds, found.basis) == (66.0, "measured before")


def test_two_ranks_show_the_network_of_three() -> None:
    # Two ranks need 1.1 s a step, of which 0.8 s are computation.
    assert seconds(ran(3, None, micro=16), ran(1, 8.0), ran(2, 11.0)) == pytest.approx(
        5 + 10 * (1.6 + 0.3)
    )


def test_rows_without_times_tell_nothing() -> None:
    asked = ran(1, None, micro=16)
    for unknown in ("train_runtime_s", "duration_s", "steps"):
        assert seconds(asked, ran(1, 8.0, **{unknown: None})) is None
    assert seconds(asked, ran(1, 8.0, model="t5-3b")) is None


def forecast(*rows: ForecastRow) -> BenchmarkForecast:
    return BenchmarkForecast(name="b", rows=rows)


def row(time: float | None, *, runs: int, finished: int = 0, refusal: str = "") -> ForecastRow:
    return ForecastRow(
        name="r",
        runs=runs,
        finished=finished,
        memory=MemoryForecast(refusal=refusal),
        time=TimeForecast(seconds=time),
    )


def test_only_runs_that_are_still_to_go_take_time() -> None:
    found = forecast(
        row(10.0, runs=3, finished=1), row(None, runs=4), row(100.0, runs=2, refusal="too large")
    )
    assert (found.runs, found.to_go) == (9, 6)
    assert found.seconds == 20.0
    assert found.without_time == 4


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
