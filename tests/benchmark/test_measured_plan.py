"""Measured steps in the table of a plan: which runs start, their figures, and refused numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from tests.support.benchrows import make_row
from tests.support.sentences import sentence
from workbench import Cluster, FineTune, LocalPods, history
from workbench.base.errors import ConfigError
from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.measured_plan import measured, measured_by, short_job
from workbench.benchmark.result import BenchmarkResult
from workbench.benchmark.row import Outcome
from workbench.display.kit.doc import to_html, to_text
from workbench.display.records.plan import plan_doc
from workbench.finetune.plan.table import Fit, Measured, PlanRow, PlanTable
from workbench.finetune.techniques.registry import TechniqueName
from workbench.finetune.techniques.sizes import Memory
from workbench.rundir.paths import ClusterPaths

GIB = 2**30
FITS: Mapping[str, Fit] = {
    "single": "tight",
    "ddp": "does not fit",
    "zero1": "fits",
    "zero3": "no limit given",
    "fsdp": "refused",
}


def table_of(job: FineTune, fits: Mapping[str, Fit] = FITS) -> PlanTable:
    rows = []
    for name, fit in fits.items():
        memory = None if fit == "refused" else Memory(parameters=0.5 * GIB)
        row = PlanRow(technique=name, fit=fit, host=memory, ranks=3, why="no 4-bit weights")
        rows.append(row)
    return PlanTable(
        model=job.model,
        parameters=1_000_000,
        trained=1_000_000,
        pods=3,
        gpu_memory_gib=None,
        memory_gib=4.0,
        job=job,
        lengths=(96, 64),
        rows=rows,
    )


class Runs:
    """Benchmarks that run nothing: a step takes 0.5 s, and zero3 fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int, int | None]] = []
        monkeypatch.setattr(Benchmark, "run", lambda grid, _pods, force: self.run(grid, force))

    def run(self, grid: Benchmark, force: bool) -> BenchmarkResult:
        assert force, "the plan has decided what fits"
        rows = []
        for planned in grid.grid.rows:
            job = planned.job
            assert isinstance(job, FineTune)
            self.asked.append((job.technique, planned.pods, job.max_steps))
            row = make_row(job.technique, planned.pods, 40.0, step_s=0.5)
            if job.technique == "zero3":
                row = replace(row, outcome=Outcome.FAILED, reason="rank 1: no compiler")
            rows.append(row)
        return BenchmarkResult(name="steps", folder=Path("steps"), rows=tuple(rows))


def test_techniques_that_fit_are_run_and_their_figures_are_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runs(monkeypatch)
    job = FineTune(max_steps=7200)
    cluster: Any = SimpleNamespace(path=tmp_path)
    table = measured(cluster, job, table_of(job), 20)
    assert runs.asked == [("single", 1, 20), ("zero1", 3, 20), ("zero3", 3, 20)]
    assert table.row("ddp").measured is None and table.row("fsdp").measured is None
    assert table.row("zero1").measured == Measured(
        steps=20, samples_per_s=48.0, memory_gib=0.52, job_s=3600.0
    )
    assert table.row("zero3").measured == Measured(steps=20, why="failed: rank 1: no compiler")
    for shown in (to_text(plan_doc(table)), to_html(plan_doc(table))):
        text = " ".join(shown.split())
        for words in ("rows/s", "measured GiB", "time of the job", "48", "0.52", "1 h"):
            assert words in text
        assert "The run of zero3 has no figures: failed: rank 1: no compiler" in text


def test_without_a_technique_that_fits_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runs(monkeypatch)
    job = FineTune()
    cluster: Any = SimpleNamespace(path=tmp_path)
    table = table_of(job, {"ddp": "does not fit", "fsdp": "refused"})
    assert measured(cluster, job, table, 20) == table and not runs.asked
    assert "measured GiB" not in to_text(plan_doc(table))


@pytest.mark.parametrize("technique", get_args(TechniqueName))
def test_the_short_job_trains_like_the_job_and_does_nothing_besides(technique: str) -> None:
    job = FineTune(
        technique="zero1",
        launcher="pdsh",
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=50,
        load_best_model_at_end=True,
        early_stopping_patience=2,
        trace_steps=30,
    )
    short = short_job(job, technique, 20)
    assert (short.technique, short.max_steps, short.gradient_accumulation_steps) == (
        technique,
        20,
        4,
    )
    assert (short.eval_strategy, short.save_steps, short.predict_rows) == ("no", 0, 0)
    assert (short.profile_step, short.trace_steps) == (0, 0)


def test_memory_is_of_a_gpu_where_gpus_compute_and_unknown_figures_stay_unknown() -> None:
    job = FineTune(max_steps=100)
    row = PlanRow(technique="ddp", fit="fits", gpus_on_pod=4)
    ran = make_row("ddp", 2, None, memory_kind="cuda", peak_memory_gib=8.0, step_s=None)
    assert measured_by(ran, job, row, 20) == Measured(steps=20, memory_gib=2.0)
    cancelled = replace(ran, outcome=Outcome.CANCELLED, reason="")
    assert measured_by(cancelled, job, row, 20).why == "cancelled"


def test_the_time_of_a_job_by_epochs_comes_from_the_rows_that_the_steps_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = SimpleNamespace(step=20, epoch=0.16)
    monkeypatch.setattr(
        "workbench.benchmark.measured_plan.Run.load", lambda _: SimpleNamespace(progress=progress)
    )
    row = PlanRow(technique="ddp", fit="fits")
    ran = make_row("ddp", 2, None, step_s=0.5, path=Path("run"))
    # A pass has 125 steps.
    for epochs, steps in ((1.0, 125), (3.0, 375), (0.001, 1)):
        found = measured_by(ran, FineTune(epochs=epochs), row, 20)
        assert found.job_s == pytest.approx(0.5 * steps)
    progress.epoch = None
    assert measured_by(ran, FineTune(), row, 20).job_s is None


@pytest.mark.parametrize("measure", [1, 0, -20, True, 2.5, "20"])
def test_a_number_of_steps_that_measures_nothing_is_refused(measure: Any, tmp_path: Path) -> None:
    cluster = Cluster(LocalPods(), path=tmp_path / "cluster")
    with pytest.raises(
        ConfigError, match=sentence("measure is {}; allowed: a number of steps from {}, or None")
    ):
        cluster.plan(FineTune(), measure=measure)


@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_measures_what_it_plans_and_stays_as_it_was(cluster: Cluster) -> None:
    runs, listed = cluster.runs, len(history(cluster.path))
    # Muon leaves the techniques without sharded weights, so fewer runs show the same.
    job = FineTune(model="tiny-llama", technique="zero1", optimizer="muon", max_steps=1000)
    table = cluster.plan(job, measure=4)
    assert cluster.runs == runs and len(history(cluster.path)) == listed
    ran = {row.technique: row.measured for row in table.rows if row.measured}
    assert {*ran} == {"single", "ddp", "zero1", "zero2"}
    for found in ran.values():
        assert found is not None and not found.why
        assert found.samples_per_s and found.memory_gib and found.job_s
    folders = {*ClusterPaths(cluster.path).measured.iterdir()}
    again = cluster.plan(job, measure=4)
    assert {*ClusterPaths(cluster.path).measured.iterdir()} == folders
    assert [row.measured for row in again.rows] == [row.measured for row in table.rows]
    assert all(row.measured is None for row in cluster.plan(job, pods=1).rows)
    with pytest.raises(ConfigError, match="pods is 3"):
        cluster.plan(job, pods=3)
