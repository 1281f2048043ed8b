"""DeepSpeed's FLOPS profiler on one optimizer step: its own switch also turns on timers for every step of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from workbench.worker.rank import collectives as ranks


def step_to_profile(asked: int, *, after: int, last: int) -> int:
    """Choose the step that is profiled: the one that was asked for, or the nearest that this run takes; 0 for none.

    Example:
        >>> [step_to_profile(5, after=after, last=20) for after in (0, 8, 20)], step_to_profile(5, after=0, last=3)
        ([5, 9, 0], 3)
    """
    return min(max(asked, after + 1), last) if asked and after < last else 0


class StepProfiler(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Profile one forward pass, and time the backward pass and the update that follow it."""

    def __init__(self, model: Any, *, step: int, micro_batch: int, report: Path, options: Mapping[str, Any]) -> None:
        self.model = model
        self.step = step
        self.micro_batch = micro_batch
        self.report = report
        self.options = {name: options[name] for name in ("module_depth", "top_modules", "detailed") if name in options}
        self.seconds: dict[str, float] = {}
        self._forward_s = 0.0
        self._began = 0.0
        self._profiler: Any = None

    @contextmanager
    def micro_batch_of(self, engine: Any) -> Iterator[None]:
        """Time a forward and a backward pass; a DeepSpeed engine also updates the weights in there."""
        began = time.perf_counter()
        with self._timed_method(engine, "step") if engine is not None else nullcontext():
            yield
        _synchronize()
        self.seconds["bwd"] = time.perf_counter() - began - self._forward_s - self.seconds.get("step", 0.0)

    @contextmanager
    def forward(self) -> Iterator[None]:
        from deepspeed.profiling.flops_profiler import FlopsProfiler

        began = time.perf_counter()
        self._profiler = FlopsProfiler(self.model, _AsEngine(self))
        self._profiler.start_profile()
        self.model.apply(_count_whole_parameters)
        try:
            with _linear_counted_once(), self._timed("fwd"):
                yield
        finally:
            self._profiler.stop_profile()
        self._forward_s = time.perf_counter() - began

    def on_pre_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Begin to time an update that happens outside of the backward pass."""
        self._began = time.perf_counter()

    def on_optimizer_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._profiler is not None and "step" not in self.seconds:
            _synchronize()
            self.seconds["step"] = time.perf_counter() - self._began

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._profiler is None:
            return
        # Its tables go to sys.stdout, which it points at the file meanwhile.
        self._profiler.print_model_profile(profile_step=self.step, output_file=str(self.report), **self.options)
        self._profiler.end_profile()
        self._profiler = None

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _synchronize()
        self.seconds[name] = time.perf_counter() - began

    @contextmanager
    def _timed_method(self, owner: Any, name: str) -> Iterator[None]:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timed(name):
                return original(*args, **kwargs)

        setattr(owner, name, timed)
        try:
            yield
        finally:
            owner.__dict__.pop(name, None)


class _AsEngine:
    """Answer what the profiler's report asks a DeepSpeed engine, from what was measured here."""

    has_moe_layers = False
    mp_world_size = 1

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler
        self.world_size = self.dp_world_size = ranks.world_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._profiler.micro_batch

    def wall_clock_breakdown(self) -> bool:
        return "step" in self._profiler.seconds

    def timers(self, name: str) -> _Timer:
        key = next(part for part in ("fwd", "bwd", "step") if name.startswith(part))
        return _Timer(self._profiler.seconds[key])


class _Timer:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def elapsed(self, _reset: bool) -> float:
        return self._seconds * 1000


@contextmanager
def _linear_counted_once() -> Iterator[None]:
    # ZeRO-3 puts a `linear` of its own in the place of torch's. It is made of `matmul`, which the profiler counts too:
    # a model under ZeRO-3 would seem to do twice the work of the same model without it.
    # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/linear.py
    from deepspeed.profiling.flops_profiler import profiler
    from torch.nn import functional

    counted = functional.linear

    def once(*args: Any, **kwargs: Any) -> Any:
        tallies = [each[-1] for each in (profiler.module_flop_count, profiler.module_mac_count) if each]
        before = [len(tally) for tally in tallies]
        output = counted(*args, **kwargs)
        for tally, length in zip(tallies, before, strict=True):
            del tally[length + 1 :]
        return output

    functional.linear = once
    try:
        yield
    finally:
        functional.linear = counted  # the profiler finds the one that it put there, and takes it off


def _count_whole_parameters(module: Any) -> None:
    # ZeRO-3 leaves an empty tensor in place of each parameter, and the profiler would count 0.
    module.__params__ = sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())


def _synchronize() -> None:
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
