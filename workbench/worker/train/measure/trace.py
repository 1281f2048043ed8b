"""torch's own profiler over some optimizer steps of rank 0: a trace of every operator, and a table of the costliest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from workbench.base.files import write_json
from workbench.rundir.paths import TRACE, TRACE_OPERATORS

_MOST = 40


def steps_to_trace(asked: int, *, after: int, last: int, profiled: int) -> range:
    """Choose the steps that are traced: after the first, which warms up, and not the one of the FLOPS profiler.

    Example:
        >>> [steps_to_trace(asked, after=0, last=20, profiled=5) for asked in (0, 2, 4, 99)]
        [range(0, 0), range(2, 4), range(6, 10), range(6, 21)]
    """
    if not asked or after >= last:
        return range(0)
    first = min(after + 2, last)
    if profiled in range(first, first + asked):
        first = min(profiled + 1, last)
    return range(first, min(first + asked, last + 1))


class StepTrace(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Trace these steps, and write trace and table into a folder."""

    def __init__(self, steps: range, out: Path) -> None:
        self.steps = steps
        self.out = out
        self._profiler: Any = None

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.steps.start:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """End after the last of them, or where training ends before."""
        if self._profiler is None or not (state.global_step == self.steps[-1] or control.should_training_stop):
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.out.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.out / TRACE))
        averages = profiler.key_averages()
        rows = sorted(averages, key=_own_us, reverse=True)[:_MOST]
        operators = [
            {
                "name": str(row.key),
                "calls": int(row.count),
                "cpu_s": row.self_cpu_time_total / 1e6,
                "device_s": getattr(row, "self_device_time_total", 0.0) / 1e6,
            }
            for row in rows
        ]
        write_json(self.out / TRACE_OPERATORS, {"steps": [self.steps.start, state.global_step], "operators": operators})


def _own_us(row: Any) -> float:
    return float(getattr(row, "self_device_time_total", 0.0) or 0.0) + float(row.self_cpu_time_total)
