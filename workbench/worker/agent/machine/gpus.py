"""How busy this pod's GPUs are, asked of NVIDIA's driver library itself; function and field names are NVML's own."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)
_EVERY_S = 5.0
_GIB = 1024**3
_LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuWatch:
    """Look at the pod's GPUs now and then; a look that fails is the last one."""

    def __init__(self, library: str = _LIBRARY):
        self._name = library
        self._library: ctypes.CDLL | None = None
        self._given_up = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() == ""
        self._looked_at = float("-inf")
        self._found: list[dict[str, float]] = []

    def latest(self) -> list[dict[str, float]]:
        """Return what the last look found, after a new one if that was some seconds ago."""
        now = time.monotonic()
        if not self._given_up and now >= self._looked_at + _EVERY_S:
            self._looked_at = now
            try:
                self._found = self._look()
            except (OSError, AttributeError, RuntimeError) as error:
                _log.info("no GPUs to watch: %s", error)
                self._given_up, self._found = True, []
        return self._found

    def _look(self) -> list[dict[str, float]]:
        if self._library is None:
            library = ctypes.CDLL(self._name)
            _call(library.nvmlInit_v2)
            self._library = library
        count = ctypes.c_uint()
        _call(self._library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        return [self._one(self._library, index) for index in _visible(count.value)]

    @staticmethod
    def _one(library: ctypes.CDLL, index: int) -> dict[str, float]:
        device, busy, memory = ctypes.c_void_p(), _Utilization(), _Memory()
        _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
        _call(library.nvmlDeviceGetMemoryInfo, device, ctypes.byref(memory))
        # A slice of a GPU (MIG) tells its memory but not how busy it is.
        has_load = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
        sizes = {"used_gib": round(memory.used / _GIB, 3), "total_gib": round(memory.total / _GIB, 3)}
        return {"index": index, **({"percent": float(busy.gpu)} if has_load else {}), **sizes}


def _call(function: Callable[..., int], *arguments: object) -> None:
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"{getattr(function, '__name__', 'NVML')} gave {code}")


def _visible(count: int) -> Sequence[int]:
    """Return the indices that this pod may use; all where its GPUs are named otherwise than by number."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    numbers = [int(name) for name in named if name.isdigit() and int(name) < count]
    return numbers if len(numbers) == len(named) and named else range(count)
