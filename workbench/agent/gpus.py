"""The pod's GPUs, as read by NVIDIA's library NVML. Every GPU is asked separately."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_EVERY_S = 5.0
_AGAIN_S = 60.0  # until a driver that gave no list of GPUs is asked again
VISIBLE = "CUDA_VISIBLE_DEVICES"
_GIB = 1024**3
_LIBRARY = "libnvidia-ml.so.1"
_SECOND_FORM = 2 << 24  # NVML's mark of a structure of version 2, beside its size

_CPU_WORDS = 64  # of 64 cores each


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Memory2(ctypes.Structure):
    """NVML's second form: `used` leaves out the memory reserved by the driver."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlError(RuntimeError):
    """A function of NVML gave another code than 0."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} gave {code}")
        self.code = code


class GpuWatch:
    """Read the pod's GPUs every few seconds."""

    def __init__(self, library: str = _LIBRARY):
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
            library = ctypes.CDLL(self._name)
            _call(library.nvmlInit_v2)
            self._library = library
        count = ctypes.c_uint()
        _call(self._library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        readings = []
        for index, name in visible(count.value, os.environ.get(VISIBLE)):
            try:
                readings.append({"index": index, **_figures(self._library, index, name)})
            except NvmlError as error:
                readings.append({"index": index, "error": error.code})
        return readings


def cores_near_gpus(given: str | None, library: str = _LIBRARY) -> list[set[int]]:
    """Return the cores near each visible GPU, in CUDA's order; empty sets where NVML is silent.

    `given` is the value of `CUDA_VISIBLE_DEVICES`; None: all GPUs.
    """
    try:
        nvml = ctypes.CDLL(library)
        _call(nvml.nvmlInit_v2)
        count = ctypes.c_uint()
        _call(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
        names = visible(count.value, given)
        return [_cores_near(nvml, index, name) for index, name in names]
    except (OSError, AttributeError, NvmlError) as error:
        _log.info("the cores near the GPUs are unknown: %s", error)
        return []


def _cores_near(library: ctypes.CDLL, index: int, name: str) -> set[int]:
    bits = (ctypes.c_ulong * _CPU_WORDS)()
    try:
        device = _device(library, index, name)
        _call(library.nvmlDeviceGetCpuAffinity, device, ctypes.c_uint(_CPU_WORDS), bits)
    except NvmlError as error:
        _log.info("the cores near GPU %d are unknown: %s", index, error)
        return set()
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return {cpu for cpu in range(width * _CPU_WORDS) if bits[cpu // width] >> cpu % width & 1}


def _device(library: ctypes.CDLL, index: int, name: str) -> ctypes.c_void_p:
    """Return NVML's handle of a GPU, by UUID if it has a name."""
    device = ctypes.c_void_p()
    if name:
        _call(library.nvmlDeviceGetHandleByUUID, name.encode(), ctypes.byref(device))
    else:
        _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
    return device


def _figures(library: ctypes.CDLL, index: int, name: str) -> dict[str, float]:
    device = _device(library, index, name)
    busy = _Utilization()
    memory = _memory_of(library, device)
    # A slice of a GPU (MIG) reports its memory but no utilization.
    has_load = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
    facts: dict[str, float] = {"percent": float(busy.gpu)} if has_load else {}
    facts["used_gib"] = round(memory.used / _GIB, 3)
    facts["total_gib"] = round(memory.total / _GIB, 3)
    return facts


def _memory_of(library: ctypes.CDLL, device: ctypes.c_void_p) -> _Memory | _Memory2:
    """Return the memory of a GPU as nvidia-smi does. Old drivers count the driver's share too.

    On an H200 without a program, `used` was 0.6 GiB by the first form, and 0 by the second.
    """
    second = _Memory2(version=ctypes.sizeof(_Memory2) | _SECOND_FORM)
    ask = getattr(library, "nvmlDeviceGetMemoryInfo_v2", None)
    if ask is not None and ask(device, ctypes.byref(second)) == 0:
        return second
    first = _Memory()
    _call(library.nvmlDeviceGetMemoryInfo, device, ctypes.byref(first))
    return first


def _call(function: Callable[..., int], *arguments: object) -> None:
    code = function(*arguments)
    if code != 0:
        raise NvmlError(getattr(function, "__name__", "NVML"), code)


def visible(count: int, given: str | None) -> list[tuple[int, str]]:
    """Return index and, if given by UUID, the UUID of every GPU that a process may use.

    `given` is the value of `CUDA_VISIBLE_DEVICES`; None: all GPUs. As in CUDA, the list ends before
    the first number without a GPU.
    """
    if given is None:
        return [(index, "") for index in range(count)]
    found = []
    for place, name in enumerate(part.strip() for part in given.split(",")):
        if not name:
            continue
        if not name.lstrip("-").isdigit():
            found.append((place, name))
        elif 0 <= int(name) < count:
            found.append((int(name), ""))
        else:
            break
    return found
