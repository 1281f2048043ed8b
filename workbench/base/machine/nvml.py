"""NVIDIA's library NVML by ctypes: handles, names and memory of GPUs and of slices of GPUs (MIG).

Standard library, no import of this package: the text also travels to hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIBRARY = "libnvidia-ml.so.1"
THROTTLE_REASONS = {0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x08: "hardware"}
"""Reasons for a lower clock that a healthy GPU does not have, by NVML's bit.

The power limit is not among them: a GPU at full load is often there.
"""
THROTTLED = sum(THROTTLE_REASONS)
_SECOND_FORM = 2 << 24  # NVML's mark of a structure of version 2, beside its size
_NAME_BYTES = 96
_MOST_DIGITS = 9


class Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Memory2(ctypes.Structure):
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


def open_nvml(library: str = LIBRARY) -> ctypes.CDLL:
    """Load and start NVML. Raises OSError, AttributeError and NvmlError."""
    loaded = ctypes.CDLL(library)
    nvml_call(loaded.nvmlInit_v2)
    return loaded


def count_of(library: ctypes.CDLL) -> int:
    """Return the number of GPUs of the machine."""
    count = ctypes.c_uint()
    nvml_call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
    return count.value


def device_of(library: ctypes.CDLL, index: int, name: str) -> ctypes.c_void_p:
    """Return NVML's handle of a GPU, by name if it has one.

    A name is a UUID, the beginning of one, or a slice in the older form `MIG-GPU-UUID/3/0`.
    """
    device = ctypes.c_void_p()
    if not name:
        nvml_call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
        return device
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)) != 0:
        whole = _whole_name(library, name)
        nvml_call(library.nvmlDeviceGetHandleByUUID, whole.encode(), ctypes.byref(device))
    return device


def _whole_name(library: ctypes.CDLL, name: str) -> str:
    """Return the only UUID that a name stands for, else the name."""
    found = set()
    for index in range(count_of(library)):
        # A GPU that does not answer is not the one.
        with contextlib.suppress(NvmlError):
            device = device_of(library, index, "")
            uuid = uuid_of(library, device)
            for each in (uuid, *slices_of(library, device)):
                if each.startswith(name) or _old_name(library, uuid, each, name) == name:
                    found.add(each)
    return found.pop() if len(found) == 1 else name


def _old_name(library: ctypes.CDLL, uuid: str, part: str, asked: str) -> str:
    """Return the name of a slice in the form before driver 470; "" for another GPU's name."""
    if part == uuid or not asked.startswith(f"MIG-{uuid}/"):
        return ""
    device = device_of(library, 0, part)
    numbers = []
    for ask in (library.nvmlDeviceGetGpuInstanceId, library.nvmlDeviceGetComputeInstanceId):
        number = ctypes.c_uint()
        nvml_call(ask, device, ctypes.byref(number))
        numbers.append(number.value)
    return f"MIG-{uuid}/{numbers[0]}/{numbers[1]}"


def uuid_of(library: ctypes.CDLL, device: ctypes.c_void_p) -> str:
    """Return the UUID of a GPU or of a slice."""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    nvml_call(library.nvmlDeviceGetUUID, device, text, ctypes.c_uint(_NAME_BYTES))
    return text.value.decode(errors="replace")


def slices_of(library: ctypes.CDLL, device: ctypes.c_void_p) -> list[str]:
    """Return the UUIDs of the slices (MIG) of a GPU; none for a whole GPU."""
    at_most = ctypes.c_uint()
    ask = getattr(library, "nvmlDeviceGetMaxMigDeviceCount", None)
    if ask is None or ask(device, ctypes.byref(at_most)) != 0:
        return []
    found = []
    for number in range(at_most.value):
        one = ctypes.c_void_p()
        place = ctypes.c_uint(number)
        if library.nvmlDeviceGetMigDeviceHandleByIndex(device, place, ctypes.byref(one)) == 0:
            found.append(uuid_of(library, one))
    return found


def memory_of(library: ctypes.CDLL, device: ctypes.c_void_p) -> Memory | Memory2:
    """Return the memory of a GPU as nvidia-smi does. Old drivers count the driver's share too.

    On an H200 without a program, `used` was 0.6 GiB by the first form, and 0 by the second.
    """
    second = Memory2(version=ctypes.sizeof(Memory2) | _SECOND_FORM)
    ask = getattr(library, "nvmlDeviceGetMemoryInfo_v2", None)
    if ask is not None and ask(device, ctypes.byref(second)) == 0:
        return second
    first = Memory()
    nvml_call(library.nvmlDeviceGetMemoryInfo, device, ctypes.byref(first))
    return first


def nvml_call(function: Callable[..., int], *arguments: object) -> None:
    code = function(*arguments)
    if code != 0:
        raise NvmlError(getattr(function, "__name__", "NVML"), code)


def visible(count: int, given: str | None) -> list[tuple[int, str]]:
    """Return index and, if given by UUID, the UUID of every GPU that a process may use.

    `given` is the value of `CUDA_VISIBLE_DEVICES`; None: all GPUs. As in CUDA, the list ends before
    the first number without a GPU, before an empty entry, and before words such as `NoDevFiles` of
    Slurm. No GPU is visible if the list has an entry twice.
    """
    if given is None:
        return [(index, "") for index in range(count)]
    found = []
    for place, name in enumerate(part.strip() for part in given.split(",")):
        is_number = name.isascii() and name.isdigit() and len(name) <= _MOST_DIGITS
        if name.startswith(("GPU-", "MIG-")):
            found.append((place, name))
        elif is_number and int(name) < count:
            found.append((int(name), ""))
        else:
            break
    distinct = {name or index for index, name in found}
    return found if len(distinct) == len(found) else []
