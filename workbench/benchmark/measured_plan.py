"""Measure the techniques of a plan: some steps of each, as rows of a benchmark."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

from workbench.benchmark.benchmark import Benchmark
from workbench.benchmark.row import BenchmarkRow, Outcome
from workbench.client.run import Run
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.notebook import cluster as notebook
from workbench.finetune.plan.plan import as_planned
from workbench.finetune.plan.table import Measured, PlanRow, PlanTable
from workbench.rundir.paths import ClusterPaths

_MEASURED = ("fits", "tight", "no limit given")


def measured(cluster: notebook.Cluster, job: FineTune, table: PlanTable, steps: int) -> PlanTable:
    """Run steps of every fitting technique on the cluster, and add their figures to the table."""
    names = [row.technique for row in table.rows if row.fit in _MEASURED]
    if not names:
        return table
    folder = ClusterPaths(cluster.path).measured
    grids = []
    for name in names:
        short = short_job(job, name, steps)
        pods = short.rules.capped(table.pods)
        grids.append(Benchmark([short], pods=[pods], path=folder, name=f"{steps} steps"))
    # The plan decides what fits, with the lengths that the user gave.
    result = reduce(add, grids).run(cluster, force=True)
    ran = dict(zip(names, result.rows, strict=True))
    rows = []
    for row in table.rows:
        found = ran.get(row.technique)
        if found is not None:
            row = replace(row, measured=measured_by(found, job, row, steps))
        rows.append(row)
    return replace(table, rows=rows)


def measured_by(ran: BenchmarkRow, job: FineTune, row: PlanRow, steps: int) -> Measured:
    """Return the figures of a benchmark's row for a row of the plan."""
    if ran.outcome is not Outcome.SUCCEEDED:
        return Measured(
            steps=steps, why=f"{ran.outcome}: {ran.reason}" if ran.reason else str(ran.outcome)
        )
    memory_gib = ran.peak_memory_gib
    if memory_gib is not None and ran.memory_kind == "cuda":
        memory_gib /= max(1, row.gpus_on_pod)
    if not ran.step_s or not ran.global_batch_size:
        return Measured(steps=steps, memory_gib=memory_gib)
    total = job.max_steps or _steps_of_epochs(ran.path, job.epochs)
    return Measured(
        steps=steps,
        samples_per_s=ran.global_batch_size / ran.step_s,
        memory_gib=memory_gib,
        job_s=None if total is None else total * ran.step_s,
    )


def _steps_of_epochs(run: Path | None, epochs: float) -> int | None:
    """Return the optimizer steps of some passes over the rows, by the progress of a run."""
    progress = Run.load(run).progress if run is not None else None
    if progress is None or not progress.step or not progress.epoch:
        return None
    return max(1, math.ceil(epochs * progress.step / progress.epoch - 1e-6))


def short_job(job: FineTune, technique: str, steps: int) -> FineTune:
    """Return some training steps of a job under a technique, and nothing besides."""
    return as_planned(job, technique).replace(
        max_steps=steps,
        eval_strategy="no",
        eval_steps=None,
        metrics=(),
        load_best_model_at_end=False,
        metric_for_best_model=None,
        early_stopping_patience=None,
        save_steps=0,
        resume=None,
        report_to=(),
        predict_rows=0,
        profile_step=0,
        trace_steps=0,
    )
