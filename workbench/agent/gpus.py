"""The pod's GPUs, as read by NVIDIA's library NVML. Every GPU is asked separately."""

from __future__ import annotations

import ctypes
import logging
import os
import time

from workbench.base.machine.nvml import (
    LIBRARY,
    VISIBLE,
    NvmlError,
    count_of,
    device_of,
    memory_of,
    nvml_call,
    open_nvml,
    visible,
)

_log = logging.getLogger(__name__)
_EVERY_S = 5.0
_AGAIN_S = 60.0  # until a driver that gave no list of GPUs is asked again
_GIB = 1024**3
_CPU_WORDS = 64  # of 64 cores each


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuWatch:
    """Read the pod's GPUs every few seconds."""

    def __init__(self, library: str = LIBRARY):
        self._name = library
        self._library: ctypes.CDLL | None = None
        self._given_up = os.environ.get(VISIBLE, "all").strip() == ""
        self._due = 0.0
        self._found: list[dict[str, float]] = []

    def latest(self) -> list[dict[str, float]]:
        """Return the latest reading, after a new reading if the last is more than 5 s old.

        Every GPU has an index, and either figures, or NVML's code as `error`. The index is the
        driver's number of the GPU. For GPUs given in `CUDA_VISIBLE_DEVICES` by UUID or as slices
        (MIG), the index is the place in the list.
        """
        now = time.monotonic()
        if self._given_up or now < self._due:
            return self._found
        self._due = now + _EVERY_S
        try:
            self._found = self._read_all()
        except (OSError, AttributeError) as error:
            _log.info("no GPUs to watch: %s", error)
            self._given_up = True
            self._found = []
        except NvmlError as error:
            _log.info("the driver lists no GPUs: %s", error)
            self._due = now + _AGAIN_S
            self._found = []
        return self._found

    def _read_all(self) -> list[dict[str, float]]:
        if self._library is None:
            self._library = open_nvml(self._name)
        readings = []
        for index, name in visible(count_of(self._library), os.environ.get(VISIBLE)):
            try:
                readings.append({"index": index, **_figures(self._library, index, name)})
            except NvmlError as error:
                readings.append({"index": index, "error": error.code})
        return readings


def cores_near_gpus(given: str | None, library: str = LIBRARY) -> list[set[int]]:
    """Return the cores near each visible GPU, in CUDA's order; empty sets where NVML is silent.

    `given` is the value of `CUDA_VISIBLE_DEVICES`; None: all GPUs.
    """
    try:
        nvml = open_nvml(library)
        names = visible(count_of(nvml), given)
        return [_cores_near(nvml, index, name) for index, name in names]
    except (OSError, AttributeError, NvmlError) as error:
        _log.info("the cores near the GPUs are unknown: %s", error)
        return []


def _cores_near(library: ctypes.CDLL, index: int, name: str) -> set[int]:
    bits = (ctypes.c_ulong * _CPU_WORDS)()
    try:
        device = device_of(library, index, name)
        nvml_call(library.nvmlDeviceGetCpuAffinity, device, ctypes.c_uint(_CPU_WORDS), bits)
    except NvmlError as error:
        _log.info("the cores near GPU %d are unknown: %s", index, error)
        return set()
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return {cpu for cpu in range(width * _CPU_WORDS) if bits[cpu // width] >> cpu % width & 1}


def _figures(library: ctypes.CDLL, index: int, name: str) -> dict[str, float]:
    device = device_of(library, index, name)
    busy = _Utilization()
    memory = memory_of(library, device)
    # A slice of a GPU (MIG) reports its memory but no utilization.
    has_load = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
    facts: dict[str, float] = {"percent": float(busy.gpu)} if has_load else {}
    facts["used_gib"] = round(memory.used / _GIB, 3)
    facts["total_gib"] = round(memory.total / _GIB, 3)
    return facts
