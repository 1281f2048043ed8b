"""Predict the needs of a run on its first pod, in a helper process forked by the agent."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

from workbench.agent.gpus import GpuWatch
from workbench.agent.probe.examine import limits
from workbench.base.files import write_json
from workbench.finetune.plan.prediction import prediction_of
from workbench.finetune.plan.tracing import trace_of

# A tenth of a rank's share: enough for a second of CPU time beside a run of some seconds.
_NICE = 10


def main() -> None:
    """Read `inquiry.json` in the working directory and write `answer.json`.

    The answer holds the `prediction` and the `trace`.
    """
    os.nice(_NICE)
    gc.disable()  # the timing of garbage collection must not change the counts
    inquiry = json.loads(Path("inquiry.json").read_text(encoding="utf-8"))
    trace = inquiry.get("trace")
    if not trace:
        from workbench.finetune.plan.trace.trace import prepared_trace

        trace = prepared_trace(inquiry["request"])
    # The variable is empty for the trace. NVML makes no CUDA context.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    prediction = prediction_of(inquiry, trace_of([trace]), limits(GpuWatch().latest()), free_gib)
    write_json(Path("answer.json"), {"prediction": prediction, "trace": trace})
