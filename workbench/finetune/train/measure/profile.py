"""Profile a step with DeepSpeed's FLOPS profiler, and trace steps with torch's own profiler.

The trace has all operators and their table. DeepSpeed's own switch for its profiler would also turn
on timers for every step of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.base.files import write_json
from workbench.rundir.paths import TRACE, TRACE_OPERATORS

_MOST_OPERATORS = 40


def step_to_profile(asked: int, *, after: int, last: int) -> int:
    """Return the step to profile: the requested or the nearest step of this run; 0 for none.

    Example:
        >>> [step_to_profile(5, after=after, last=20) for after in (0, 8, 20)]
        [5, 9, 0]
        >>> step_to_profile(5, after=0, last=3)
        3
    """
    return min(max(asked, after + 1), last) if asked and after < last else 0


def steps_to_trace(asked: int, *, after: int, last: int, profiled: int) -> range:
    """Return the steps to trace: after the first, which warms up, and without the profiled step.

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


class StepProfiler(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Profile one forward pass, and time the following backward pass and update."""

    def __init__(
        self,
        model: Any,
        step: int,
        *,
        micro_batch: int,
        report: Path,
        options: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.step = step
        self.micro_batch = micro_batch
        self.report = report
        self.options = {
            name: options[name]
            for name in ("module_depth", "top_modules", "detailed")
            if name in options
        }
        self.seconds: dict[str, float] = {}
        self._forward_s = 0.0
        self._began = 0.0
        self._profiler: Any = None

    @contextmanager
    def micro_batch_of(self, engine: Any) -> Iterator[None]:
        """Time a forward and a backward pass.

        A DeepSpeed engine also updates the weights inside.
        """
        began = time.perf_counter()
        with self._timed_method(engine, "step") if engine is not None else nullcontext():
            yield
        _synchronize()
        took_s = time.perf_counter() - began
        self.seconds["bwd"] = took_s - self._forward_s - self.seconds.get("step", 0.0)

    @contextmanager
    def forward(self) -> Iterator[None]:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        began = time.perf_counter()
        self._profiler = FlopsProfiler(self.model, self._as_engine())
        self._profiler.start_profile()
        self.model.apply(_count_whole_parameters)
        try:
            with _linear_counted_once(), self._timed("fwd"):
                yield
        finally:
            self._profiler.stop_profile()
        self._forward_s = time.perf_counter() - began

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Start to time an update outside of the backward pass."""
        self._began = time.perf_counter()

    def on_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._profiler is not None and "step" not in self.seconds:
            _synchronize()
            self.seconds["step"] = time.perf_counter() - self._began

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._profiler is None:
            return
        # The profiler prints tables to sys.stdout, and redirects sys.stdout to the file meanwhile.
        self._profiler.print_model_profile(
            profile_step=self.step, output_file=str(self.report), **self.options
        )
        self._profiler.end_profile()
        self._profiler = None

    def _as_engine(self) -> SimpleNamespace:
        """Return an object with the parts of a DeepSpeed engine that the report reads."""

        def timers(name: str) -> SimpleNamespace:
            key = next(part for part in ("fwd", "bwd", "step") if name.startswith(part))
            return SimpleNamespace(elapsed=lambda _reset: self.seconds[key] * 1000)

        return SimpleNamespace(
            has_moe_layers=False,
            mp_world_size=1,
            world_size=ranks.world_size(),
            dp_world_size=ranks.world_size(),
            train_micro_batch_size_per_gpu=lambda: self.micro_batch,
            wall_clock_breakdown=lambda: "step" in self.seconds,
            timers=timers,
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _synchronize()
        self.seconds[name] = time.perf_counter() - began

    @contextmanager
    def _timed_method(self, owner: Any, name: str) -> Iterator[None]:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timed(name):
                return original(*args, **kwargs)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            owner.__dict__.pop(name, None)


class StepTrace(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Trace some steps, and write trace and table into a folder."""

    def __init__(self, steps: range, out: Path) -> None:
        self.steps = steps
        self.out = out
        self._profiler: Any = None

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.steps.start:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """End the trace after the last traced step."""
        if state.global_step == self.steps[-1]:
            self._write(state.global_step)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """End the trace if training stopped earlier."""
        self._write(state.global_step)

    def _write(self, last: int) -> None:
        if self._profiler is None:
            return
        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        self.out.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.out / TRACE))
        averages = profiler.key_averages()
        rows = sorted(averages, key=_own_us, reverse=True)[:_MOST_OPERATORS]
        operators = []
        for row in rows:
            operator = {
                "name": str(row.key),
                "calls": int(row.count),
                "cpu_s": row.self_cpu_time_total / 1e6,
                "device_s": getattr(row, "self_device_time_total", 0.0) / 1e6,
            }
            operators.append(operator)
        report = {"steps": [self.steps.start, last], "operators": operators}
        write_json(self.out / TRACE_OPERATORS, report)


def _own_us(row: Any) -> float:
    device_us = float(getattr(row, "self_device_time_total", 0.0) or 0.0)
    cpu_us = float(row.self_cpu_time_total)
    return device_us + cpu_us


@contextmanager
def _linear_counted_once() -> Iterator[None]:
    # ZeRO-3 replaces torch's `linear` with its own, made of `matmul`. The profiler counts both: a
    # model would seem to do twice as much work under ZeRO-3.
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/linear.py
    from deepspeed.profiling.flops_profiler import profiler
    from torch.nn import functional

    counted = functional.linear

    def once(*args: Any, **kwargs: Any) -> Any:
        stacks = (profiler.module_flop_count, profiler.module_mac_count)
        tallies = [stack[-1] for stack in stacks if stack]
        before = [len(tally) for tally in tallies]
        output = counted(*args, **kwargs)
        for tally, length in zip(tallies, before, strict=True):
            del tally[length + 1 :]
        return output

    functional.linear = once
    try:
        yield
    finally:
        # The profiler finds its own function here, and removes it.
        functional.linear = counted


def _count_whole_parameters(module: Any) -> None:
    # ZeRO-3 leaves an empty tensor in place of each parameter, so the profiler would count 0.
    module.__params__ = sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())


def _synchronize() -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
