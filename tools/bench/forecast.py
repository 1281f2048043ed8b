"""Rows of `make bench` on forecasts of speed-ups, against what then runs on local pods."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.recorded import Case, Outcome, compare
from tools.bench.pair import Pair
from workbench import Cluster, FineTune, LocalPods, PodSpec

__all__ = ["forecasts"]

TECHNIQUES = {"none": ("ddp", "zero1", "zero2", "zero3", "fsdp", "local-sgd"), "lora": ("zero1",)}
"""By which weights are trained."""
CASES = ((1, 3), (4, 2))
"""Micro-batches a step, and pods."""
STEPS = int(os.environ.get("BENCH_STEPS", "24"))
MODEL = os.environ.get("BENCH_MODEL", "tiny-t5")


def forecasts(root: Path) -> Iterator[Sequence[Pair]]:
    """Compare predicted with measured speed-ups, technique by accumulation and pods."""
    job = FineTune(
        model=MODEL, eval_strategy="no", predict_rows=0, profile_step=0, logging_steps=100
    )
    with Cluster(LocalPods(), PodSpec(cpus=1), count=3, path=root / "forecasts") as cluster:
        found: list[Outcome] = []

        def off() -> float:
            found[:] = _outcomes(cluster, job)
            return 100 * statistics.median(abs(outcome.off) for outcome in found)

        def off_plain() -> float:
            """Return how far off the plain way is: as many times faster as there are pods."""
            return 100 * statistics.median(
                abs(outcome.pods / outcome.measured - 1) for outcome in found
            )

        both = {"plain_is": "as many times one pod as there are pods", "turns": 1}
        yield [
            Pair(
                what="% that the forecast of a speed-up is off, median over techniques",
                ours=off,
                plain=off_plain,
                bound="<= 15 %",
                **both,
            ),
            Pair(
                what="% of the measured speed-ups that lie inside their intervals",
                ours=lambda: 100 * statistics.fmean(outcome.inside for outcome in found),
                plain=lambda: 100 * statistics.fmean(_near(outcome) for outcome in found),
                bound=">= 90 %",
                more_is_better=True,
                **both,
            ),
            Pair(
                what="% of its figure that an interval is wide, median over techniques",
                ours=lambda: 100 * statistics.median(outcome.width for outcome in found),
                plain=lambda: 20.0,
                plain_is="a tenth to either side of the pods",
                bound="<= 40 %",
                turns=1,
            ),
        ]


def _near(outcome: Outcome) -> bool:
    return abs(outcome.measured / outcome.pods - 1) <= 0.1


def _outcomes(cluster: Cluster, job: FineTune) -> list[Outcome]:
    found: list[Outcome] = []
    for peft, techniques in TECHNIQUES.items():
        base = job.replace(peft=peft)
        measured = cluster.plan(base)
        print(f"    {measured.turns}, {measured.exchange}", file=sys.stderr, flush=True)
        cases = []
        for accumulation, pods in CASES:
            case = Case(accumulation, pods)
            short = base.replace(gradient_accumulation_steps=accumulation, max_steps=STEPS)
            for technique in _with_single(techniques):
                count = 1 if technique == "single" else pods
                run = cluster.submit(short.replace(technique=technique), pods=count)
                case.add(technique, run.wait(progress=False).raise_for_status().step_s)
            cases.append(case)
        found += compare(base, measured.turns, measured.exchange, cases)
    for outcome in found:
        print(f"    {outcome}", file=sys.stderr, flush=True)
    return found


def _with_single(techniques: Sequence[str]) -> list[str]:
    """Return the techniques with `single` before and after each three of them."""
    order = ["single"]
    for place in range(0, len(techniques), 3):
        order += [*techniques[place : place + 3], "single"]
    return order
