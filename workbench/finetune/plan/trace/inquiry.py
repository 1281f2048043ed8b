"""Answer, on a pod and beside a run, what the run is predicted to need: a helper that the agent has forked."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

from workbench.agent.machine import GpuWatch
from workbench.agent.probe.examine import limits
from workbench.base.files import write_json
from workbench.finetune.plan.prediction import prediction_of
from workbench.finetune.plan.tracing import trace_of

_NICE = 10  # a tenth of a rank's share: a second of CPU must come to an end beside a run of some seconds


def main() -> None:
    """Read `inquiry.json` in the working directory, leave `answer.json`: the `prediction` and the `trace`."""
    os.nice(_NICE)
    gc.disable()  # what a step holds must not depend on when cycles are collected
    inquiry = json.loads(Path("inquiry.json").read_text(encoding="utf-8"))
    trace = inquiry.get("trace")
    if not trace:
        from workbench.finetune.plan.trace.trace import prepared_trace

        trace = prepared_trace(inquiry["request"])
    os.environ.pop(
        "CUDA_VISIBLE_DEVICES", None
    )  # set to nothing for the trace; NVML makes no CUDA context
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    prediction = prediction_of(inquiry, trace_of([trace]), limits(GpuWatch().latest()), free_gib)
    write_json(Path("answer.json"), {"prediction": prediction, "trace": trace})
