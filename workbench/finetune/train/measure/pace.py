"""Compare the ranks by the time of their own work in a step, in which no rank waits for another.

Own work is fetching the rows, and the forward passes if ranks run them alone. A rank that is slow
in them is slow in its whole step, in which the other ranks wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import SupportsFloat

import torch

from workbench.agent.rank import collectives as ranks
from workbench.finetune.train.measure.meter import StepMeter, Stopwatch
from workbench.rundir.events import EventKind, emit

_EVERY_S = 60.0
_LEAST_STEPS = 10
_WARM_UP = 2  # first steps, in which libraries compile and choose their kernels
_BEHIND = 1  # steps between the work and its report, so that no rank waits for its GPU
_DIGITS = 6


class Pace:
    """Times of this rank's own work, and on rank 0 the sums of all ranks."""

    def __init__(self, clock: StepMeter, device: torch.device, *, forward_is_own: bool) -> None:
        self._clock = clock
        self._device = device
        self._forward_is_own = forward_is_own
        self._steps: deque[list[SupportsFloat]] = deque()
        self._warmed_up = 0
        # Sums of every rank since the last event, and their steps.
        self._own_s: list[float] = []
        self._count = 0
        self._since_s = 0.0

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Time the fetching of the rows of a new step."""
        began = time.perf_counter()
        yield
        self._steps.append([time.perf_counter() - began])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Time a forward pass of training. A technique that joins ranks in it has no own time."""
        if not self._forward_is_own or not self._steps:
            yield
            return
        stopwatch = Stopwatch(self._device).begin()
        yield
        self._steps[-1].append(stopwatch.end())

    def take(self) -> float:
        """Return the seconds of own work in an earlier step whose loss was read; 0 if none is."""
        # The newest step has only its rows so far.
        if len(self._steps) <= 1 + _BEHIND:
            return 0.0
        return sum(float(seconds) for seconds in self._steps.popleft())

    def add(self, own_s: Sequence[float], steps: int = 1) -> None:
        """Add the seconds of every rank's own work in some steps; zeros have no effect."""
        if not any(own_s):
            return
        self._warmed_up += steps
        if self._warmed_up <= _WARM_UP:
            self._since_s = self._clock.runtime_s
            return
        before = self._own_s or [0.0] * len(own_s)
        self._own_s = [total + one for total, one in zip(before, own_s, strict=True)]
        self._count += steps
        if self._clock.runtime_s - self._since_s >= _EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Emit the means since the last event, on rank 0 and unless the steps are too few."""
        if self._count < _LEAST_STEPS:
            return
        took_s = self._clock.runtime_s - self._since_s
        if ranks.rank() == 0:
            emit(
                EventKind.PACE,
                steps=self._count,
                step_s=round(took_s / self._count, _DIGITS),
                own_s=[round(total / self._count, _DIGITS) for total in self._own_s],
            )
        self._since_s = self._clock.runtime_s
        self._count = 0
        self._own_s = []
