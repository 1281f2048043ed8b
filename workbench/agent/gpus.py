"""The pod's GPUs, as read by NVIDIA's library NVML. Every GPU is asked separately."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from workbench.base.machine.nvml import (
    LIBRARY,
    THROTTLED,
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
_PATIENCE_S = 0.1  # a driver without trouble answers within milliseconds
_SOON_S = 1.0
_LATE_S = 30.0  # a busy driver may take some seconds
_TIMEOUT = 10.0  # NVML's code of a time-out
_AGAIN_S = 60.0  # until a driver that gave no list of GPUs is asked again
_GIB = 1024**3
_CPU_WORDS = 64  # of 64 cores each
# Constants of nvml.h.
_UNCORRECTED = ctypes.c_uint(1)
_SINCE_DRIVER_LOAD = ctypes.c_uint(0)
_SM_CLOCK = ctypes.c_uint(1)
_XID = ctypes.c_ulonglong(8)
_XIDS_AT_ONCE = 64
_Answer = TypeVar("_Answer")


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class XidWatch:
    """Errors of GPUs by the driver (Xid). None without the right to read the errors."""

    def __init__(self, library: ctypes.CDLL, names: Sequence[tuple[int, str]]) -> None:
        self._library = library
        self._events = ctypes.c_void_p()
        self._indices: dict[int | None, int] = {}
        self._last: dict[int, float] = {}
        try:
            nvml_call(library.nvmlEventSetCreate, ctypes.byref(self._events))
        except (AttributeError, NvmlError) as error:
            _log.info("errors of GPUs (Xid) are not reported: %s", error)
            return
        for index, name in names:
            try:
                device = device_of(library, index, name)
                nvml_call(library.nvmlDeviceRegisterEvents, device, _XID, self._events)
                self._indices[device.value] = index
            except NvmlError as error:  # a slice, or a GPU that is lost already
                _log.info("errors of GPU %d (Xid) are not reported: %s", index, error)

    def last(self) -> dict[int, float]:
        """Return the last error of every GPU with an error, by index. Does not wait."""
        event = _Event()
        for _ in range(_XIDS_AT_ONCE if self._indices else 0):
            if self._library.nvmlEventSetWait_v2(self._events, ctypes.byref(event), 0) != 0:
                break
            index = self._indices.get(event.device)
            if index is not None:
                self._last[index] = float(event.data)
        return self._last


class Question(Generic[_Answer]):
    """A question to the driver, asked in a thread. A driver in trouble may take minutes.

    The agent's loop must not wait so long: the keeper would lose the ranks of the pod.
    """

    def __init__(self, ask: Callable[[], _Answer]):
        self._ask = ask
        self._thread: threading.Thread | None = None
        self._asked_s = 0.0
        self._answer: _Answer | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Ask, unless the driver still works on the last question. Raises RuntimeError."""
        if self._thread is None or not self._thread.is_alive():
            self._asked_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        self._error = None
        try:
            self._answer = self._ask()
        except Exception as error:  # thread boundary: the caller receives the error
            self._error = error

    def answer(self, wait_s: float) -> _Answer | None:
        """Return the latest answer, or raise its error. None: no answer yet, or none for long."""
        if self._thread is not None:
            self._thread.join(wait_s)
            if self._error is not None:
                raise self._error
            if self._thread.is_alive() and self.is_late:
                return None
        return self._answer

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._asked_s >= _LATE_S


class GpuWatch:
    """Read the pod's GPUs every few seconds."""

    def __init__(self, library: str = LIBRARY, patience_s: float = _PATIENCE_S):
        """Set the longest wait for the driver, in seconds."""
        self._name = library
        self._patience_s = patience_s
        self._library: ctypes.CDLL | None = None
        self._given_up = os.environ.get(VISIBLE, "all").strip() == ""
        self._due = 0.0
        self._found: list[dict[str, float]] = []
        self._names: list[tuple[int, str]] = []
        self._list = Question(self._visible)
        self._readings: dict[tuple[int, str], Question[dict[str, float]]] = {}
        self._xids: Question[dict[int, float]] | None = None

    def latest(self) -> list[dict[str, float]]:
        """Return the latest reading, after a new reading if the last is more than 5 s old.

        Every GPU has an index, and either figures, or NVML's code as `error`. A GPU whose driver
        reported an error has the last as `xid`. The index is the
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
        except RuntimeError as error:  # of the driver, or of a thread that cannot start
            _log.info("the driver lists no GPUs: %s", error)
            self._due = now + _AGAIN_S
            self._found = []
        return self._found

    def _visible(self) -> list[tuple[int, str]]:
        if self._library is None:
            self._library = open_nvml(self._name)
        return visible(count_of(self._library), os.environ.get(VISIBLE))

    def _reading(self, index: int, name: str) -> dict[str, float]:
        assert self._library is not None
        try:
            return {"index": index, **_figures(self._library, index, name)}
        except NvmlError as error:
            return {"index": index, "error": error.code}

    def _read_all(self) -> list[dict[str, float]]:
        self._list.begin()
        names = self._list.answer(self._patience_s)
        if names is None and not self._list.is_late:  # the driver is starting
            self._due -= _EVERY_S - _SOON_S
            return []
        if names is None:
            return self._unanswered()
        self._names = names
        for name in names:
            self._readings.setdefault(name, Question(partial(self._reading, *name))).begin()
        found = []
        for name in names:
            question = self._readings[name]
            figures = question.answer(self._patience_s / len(names))
            if figures is not None:
                found.append(figures)
            elif question.is_late:
                found.append({"index": name[0], "error": _TIMEOUT})
        if self._xids is None and names and self._library is not None:
            self._xids = Question(XidWatch(self._library, names).last)
        if self._xids is not None:
            self._xids.begin()
            xids = self._xids.answer(self._patience_s) or {}
            for gpu in found:
                if gpu["index"] in xids:
                    gpu["xid"] = xids[int(gpu["index"])]
        return found

    def _unanswered(self) -> list[dict[str, float]]:
        given = os.environ.get(VISIBLE)
        names = self._names or (visible(sys.maxsize, given) if given else [])
        return [{"index": index, "error": _TIMEOUT} for index, _ in names]


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
    return facts | _health(library, device)


def _health(library: ctypes.CDLL, device: ctypes.c_void_p) -> dict[str, float]:
    """Return memory errors, and reasons for a lower clock."""

    def asked(name: str, *arguments: object) -> int:
        value = ctypes.c_ulonglong()
        function = getattr(library, name, None)
        known = function is not None and function(device, *arguments, ctypes.byref(value)) == 0
        return value.value if known else 0

    health: dict[str, float] = {}
    errors = asked("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _SINCE_DRIVER_LOAD)
    if errors:
        health["ecc_errors"] = errors
    reasons = asked("nvmlDeviceGetCurrentClocksThrottleReasons") & THROTTLED
    if reasons:
        health["throttle"] = reasons
        # NVML writes clocks as 32 bits, the lower half of the value.
        health["sm_mhz"] = asked("nvmlDeviceGetClockInfo", _SM_CLOCK)
        health["most_mhz"] = asked("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
    return health
