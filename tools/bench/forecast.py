"""A row of `make bench` on the forecast of a step's time, against what then runs on local pods."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.bench.pair import Pair
from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.finetune.plan.plan import plan

__all__ = ["forecasts"]

TECHNIQUES = {"none": ("ddp", "zero1", "zero2", "zero3", "fsdp", "local-sgd"), "lora": ("zero1",)}
"""By which weights are trained."""
CASES = ((1, 3), (4, 2))
"""Micro-batches a step, and pods."""
STEPS = int(os.environ.get("BENCH_STEPS", "24"))
MODEL = os.environ.get("BENCH_MODEL", "tiny-t5")


def forecasts(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare predicted with measured seconds of a step, technique by accumulation and pods."""
    job = FineTune(
        model=MODEL, eval_strategy="no", predict_rows=0, profile_step=0, logging_steps=100
    )
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "forecasts") as cluster:
        table: list[tuple[float, float]] = []

        def errors() -> float:
            table[:] = _errors(cluster, job)
            return 100 * statistics.median(error for error, _ in table)

        def sums() -> float:
            """The plain way: one pod's step, whatever the pods."""
            return 100 * statistics.median(error for _, error in table)

        both = {"plain_is": "one pod's step as it is", "turns": 1}
        yield [
            Pair(
                what="% that the forecast of a step is off, median over techniques",
                ours=errors,
                plain=sums,
                bound="<= 15 %",
                **both,
            ),
            Pair(
                what="% of the forecasts that are at most 15 % off",
                ours=lambda: _share(ours for ours, _ in table),
                plain=lambda: _share(plain for _, plain in table),
                bound=">= 100 %",
                more_is_better=True,
                **both,
            ),
        ]


def _share(errors: Iterator[float]) -> float:
    every = list(errors)
    return 100 * sum(error <= 0.15 for error in every) / len(every)


def _errors(cluster: Cluster, job: FineTune) -> list[tuple[float, float]]:
    """Return how far off the forecast, and one pod's own step, were from each measured step."""
    found: list[tuple[float, float]] = []
    for peft, techniques in TECHNIQUES.items():
        base = job.replace(peft=peft)
        measured = cluster.plan(base)
        paces, exchange, one = measured.paces, measured.exchange, measured.paces["single"]
        print(f"    {one}, {exchange}", file=sys.stderr, flush=True)
        for accumulation, pods in CASES:
            planned = base.replace(gradient_accumulation_steps=accumulation)
            table = plan(planned, pods=pods, paces=paces, exchange=exchange)
            for technique in techniques:
                own = planned.replace(technique=technique, max_steps=STEPS)
                step_s = (
                    cluster.submit(own, pods=pods).wait(progress=False).raise_for_status().step_s
                    or 0.0
                )
                predicted_s = table.row(technique).step_s or 0.0
                alone_s = accumulation * one.micro_batch_s + one.update_s
                found.append((abs(predicted_s / step_s - 1), abs(alone_s / step_s - 1)))
                words = (
                    f"{technique} {peft} x{accumulation} on {pods}: "
                    f"{predicted_s:.4f} s, measured {step_s:.4f}"
                )
                print(
                    f"    {words}, off {predicted_s / step_s - 1:+.0%}", file=sys.stderr, flush=True
                )
    return found
