"""Read the micro-batches of the next step while a GPU works on the present one.

Without the thread, a GPU is idle while rows are read, padded and page-locked: some 10 ms for 8 rows
of 4,096 tokens. On a CPU the rows would take the time of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_READY = 2
"""Micro-batches that are ready when a step begins. A longer queue gives no time back."""


class Ahead:
    """Micro-batches of an iterator in its order, read by one thread."""

    def __init__(self, batches: Iterator[Any], device: torch.device) -> None:
        self.batches = batches
        options: dict[str, Any] = {}
        if device.type == "cuda":
            # Page-locked memory of a thread belongs to its own GPU, by default the first.
            options = {"initializer": torch.cuda.set_device, "initargs": (device,)}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows", **options)
        self._read: deque[Future[Any]] = deque()
        for _ in range(_READY):
            self._ask()

    def take(self, count: int) -> list[Any]:
        """Return the next micro-batches, fewer at the end. An error of reading is raised here."""
        taken: list[Any] = []
        while len(taken) < count:
            batch = self._read[0].result()
            if batch is None:
                break
            self._read.popleft()
            self._ask()
            taken.append(batch)
        return taken

    def close(self) -> None:
        """End the thread after the micro-batch that is being read."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ask(self) -> None:
        self._read.append(self._thread.submit(next, self.batches, None))
