"""Record the timings of a plan and of the runs that it predicts, on local pods of this machine.

`python -m tests.finetune.plan.record FILE REPETITIONS` appends one JSON line a repetition to FILE.
A turn of the plan's timed steps and the runs of every technique alternate. A run of `single` comes
before and after each three runs. test_recorded.py reads the lines.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench import Cluster, FineTune, LocalPods, PodSpec
from workbench.client.checkup import diagnose
from workbench.finetune.notebook.checkup import timed_runs

PODS = 3
TURNS = 3
CASES = ((1, 3, 20), (4, 2, 10))
"""Micro-batches of a step, pods and steps of the measured runs."""
JOB = FineTune(
    model="tiny-t5", eval_strategy="no", predict_rows=0, profile_step=0, logging_steps=100
)
MEASURED = ("ddp", "zero1", "zero2", "zero3", "fsdp", "local-sgd")


def repetition(cluster: Cluster) -> dict[str, object]:
    load = os.getloadavg()
    began_s = time.time()
    exchange = diagnose(cluster._paths, list(cluster.pods), cluster.spec, bandwidth=True).exchange
    assert exchange is not None and not exchange.problem
    turns = []
    runs: list[dict[str, Any]] = [
        {"accumulation": accumulation, "pods": pods, "took": []} for accumulation, pods, _ in CASES
    ]
    # Plan and runs alternate, so that both see the same load of the machine.
    for _ in range(TURNS):
        # Pods on fewer cores share them, also where other load hides that from the doctor.
        shared = replace(exchange, slowdowns=((2, 1.5), (PODS, 2.0)))
        alone, *others = timed_runs(JOB, shared, PODS)
        turns.append([timed(cluster, *run) for run in (alone, *others, alone)])
        for case, (accumulation, pods, steps) in zip(runs, CASES, strict=True):
            base = JOB.replace(gradient_accumulation_steps=accumulation, max_steps=steps)
            for technique in ("single", *MEASURED[:3], "single", *MEASURED[3:], "single"):
                count = 1 if technique == "single" else pods
                run = cluster.submit(base.replace(technique=technique), pods=count)
                result = run.wait(progress=False).raise_for_status()
                case["took"].append([technique, result.step_s])
    return {
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime(began_s)),
        "took_s": round(time.time() - began_s),
        "load": [round(load[0], 1), round(os.getloadavg()[2], 1)],
        "exchange": asdict(exchange),
        "turns": turns,
        "runs": runs,
    }


def timed(cluster: Cluster, job: FineTune, pods: int) -> Sequence[object]:
    result = cluster.submit(job, pods=pods).wait(progress=False).raise_for_status()
    return [job.technique, pods, result.step_s, result.micro_batch_s]


def main() -> None:
    file, repetitions = Path(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        for number in range(repetitions):
            path = Path(folder) / str(number)
            with Cluster(LocalPods(), PodSpec(cpus=1), count=PODS, path=path) as cluster:
                line = json.dumps(repetition(cluster))
            with file.open("a") as lines:
                lines.write(line + "\n")


if __name__ == "__main__":
    main()
