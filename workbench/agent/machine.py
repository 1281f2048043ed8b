"""The agent's machine: memory of processes, memory limits, out-of-memory kills, GPUs, network."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base.process import control_groups

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ROOT = Path("/sys/fs/cgroup")
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_HIGHEST = ("memory.peak", "memory.max_usage_in_bytes")
_FULL = 0.99
_UNLIMITED_BYTES = 1 << 60
_log = logging.getLogger(__name__)
_EVERY_S = 5.0
_GIB = 1024**3
_LIBRARY = "libnvidia-ml.so.1"
_SECOND_FORM = 2 << 24  # NVML's mark of a structure of version 2, beside its size
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def memory(pid: int) -> tuple[int, int]:
    """Return a process's current and peak resident memory in bytes; zeros for an ended process."""
    now = peak = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = Path(f"/proc/{pid}/statm").read_bytes().split()
        now = int(pages[1]) * _PAGE_BYTES
        status = Path(f"/proc/{pid}/status").read_bytes()
        at = status.find(b"VmHWM:")
        if at >= 0:
            peak_kib = status[at:].split(None, 2)[1]
            peak = int(peak_kib) * 1024
    return now, max(now, peak)


def family_memory(sizes: Mapping[int, int]) -> int:
    """Return the resident bytes of several processes. Pages shared with a fork count once."""
    if len(sizes) < 2:
        return sum(sizes.values())
    total = 0
    for pid, size in sizes.items():
        share = _share(pid)
        total += size if share is None else share
    return max(*sizes.values(), total)


def _share(pid: int) -> int | None:
    """Return a process's proportional set size (PSS) in bytes, or None if it cannot be read.

    A page that several processes share is divided by the number of the processes.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        at = text.index(b"\nPss:")
        share_kib = text[at:].split(None, 2)[1]
        return int(share_kib) * 1024
    return None


def memory_group(pid: int, *, ended: bool = False) -> Path | None:
    """Return the folder of a process's memory cgroup, or None."""
    paths = {}
    for name, path in control_groups(pid).items():
        paths[name] = path.removesuffix(" (deleted)")
    candidates: list[Path] = []
    # In a container the path may be the host's, while the mount shows only the container's group.
    if "memory" in paths and not ended:
        candidates.append(_ROOT / "memory" / paths["memory"])
        candidates.append(_ROOT / "memory")
    if "" in paths:
        candidates.append(_ROOT / paths[""])
        candidates.append(_ROOT / "unified" / paths[""])
        candidates.append(_ROOT)
    for folder in candidates:
        if _counter(folder) is not None:
            return folder
    return None


def memory_limit_bytes(pid: int) -> int | None:
    """Return the smallest limit of the memory groups around a process, in bytes; None: no limit."""
    group = memory_group(pid)
    if group is None:
        return None
    limits = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(_ROOT):
            continue
        limit = _limit_bytes(folder)
        if limit is not None:
            limits.append(limit)
    return min(limits, default=None)


@dataclass(slots=True)
class OomWatch:
    """Count of out-of-memory kills in the memory groups of our processes."""

    _before: dict[Path, int] = field(default_factory=dict)

    def add_group_of(self, pid: int, *, ended: bool = False) -> Path | None:
        group = memory_group(pid, ended=ended)
        if group is not None and group not in self._before:
            before = 0
            if not ended:
                before = _counter(group) or 0
            self._before[group] = before
        return group

    def counts(self) -> Mapping[Path, int]:
        kills = {}
        for group, before in self._before.items():
            now = _counter(group) or 0
            kills[group] = max(0, now - before)
        return kills

    def may_follow(self) -> bool:
        """Whether a kill may still be counted: a group has been as full as its limit allows."""
        for group in self._before:
            limit = _limit_bytes(group)
            highest = _first_number(group, _HIGHEST)
            if limit is None or highest is None:
                continue
            if highest >= _FULL * limit:
                return True
        return False

    def hint(self, group: Path | None) -> str:
        """Return a message if the counter shows an out-of-memory kill in this group, else ""."""
        counts = self.counts()
        if group is not None and counts.get(group):
            full = group
        elif counts:
            full = max(counts, key=lambda each: counts[each])
        else:
            return ""
        kills = counts[full]
        if not kills:
            return ""
        limit = _limit_bytes(full)
        at = f" of {limit / 2**20:.0f} MiB" if limit else ""
        return f"out of memory: the memory limit{at} was reached (oom_kill counter +{kills})"


def _counter(group: Path) -> int | None:
    for name in _COUNTERS:
        try:
            lines = (group / name).read_text().splitlines()
            pairs = [line.split() for line in lines]
            kills = [int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"]
        except (OSError, ValueError):
            continue
        if kills:
            return kills[0]
    return None


def _limit_bytes(group: Path) -> int | None:
    value = _first_number(group, _LIMITS)
    if value is None or value >= _UNLIMITED_BYTES:
        return None
    return value


def _first_number(group: Path, names: Sequence[str]) -> int | None:
    for name in names:
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):
            continue
    return None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Memory2(ctypes.Structure):
    """NVML's second form: `used` leaves out what the driver reserves for itself."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuWatch:
    """Read the pod's GPUs every few seconds, until a reading fails."""

    def __init__(self, library: str = _LIBRARY):
        self._name = library
        self._library: ctypes.CDLL | None = None
        self._given_up = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() == ""
        self._looked_at = float("-inf")
        self._found: list[dict[str, float]] = []

    def latest(self) -> list[dict[str, float]]:
        """Return the latest reading, after a new reading if the last is more than 5 s old."""
        now = time.monotonic()
        if not self._given_up and now >= self._looked_at + _EVERY_S:
            self._looked_at = now
            try:
                self._found = self._read_all()
            except (OSError, AttributeError, RuntimeError) as error:
                _log.info("no GPUs to watch: %s", error)
                self._given_up = True
                self._found = []
        return self._found

    def _read_all(self) -> list[dict[str, float]]:
        if self._library is None:
            library = ctypes.CDLL(self._name)
            _call(library.nvmlInit_v2)
            self._library = library
        count = ctypes.c_uint()
        _call(self._library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        return [self._one(self._library, index) for index in _visible(count.value)]

    @staticmethod
    def _one(library: ctypes.CDLL, index: int) -> dict[str, float]:
        device = ctypes.c_void_p()
        busy = _Utilization()
        _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
        memory = _memory_of(library, device)
        # A slice of a GPU (MIG) reports its memory but no utilization.
        has_load = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy)) == 0
        facts: dict[str, float] = {"index": index}
        if has_load:
            facts["percent"] = float(busy.gpu)
        facts["used_gib"] = round(memory.used / _GIB, 3)
        facts["total_gib"] = round(memory.total / _GIB, 3)
        return facts


def _memory_of(library: ctypes.CDLL, device: ctypes.c_void_p) -> _Memory | _Memory2:
    """Return the memory of a GPU as nvidia-smi shows it. Old drivers count their own share too.

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
        raise RuntimeError(f"{getattr(function, '__name__', 'NVML')} gave {code}")


def _visible(count: int) -> Sequence[int]:
    """Return the indices of the GPUs that this pod may use; all if any has no number."""
    parts = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = [part.strip() for part in parts if part.strip()]
    numbers = [int(name) for name in named if name.isdigit() and int(name) < count]
    if not named or len(numbers) < len(named):
        return range(count)
    return numbers


def address_for_others(address: str) -> str:
    """Return the address by which other machines reach this machine, given its address or name.

    On Debian and Ubuntu a machine's own name is a loopback address there, and a name may be unknown
    on its own machine. The address of the login, which the keeper reached, then takes its place.
    """
    try:
        found = _resolve(address)
    except (OSError, ValueError):
        found = []
    if found and (str(found[0]) == address or not found[0].is_loopback):
        return address
    for ip in (*found, *_login_address()):
        if not ip.is_loopback and not ip.is_link_local:
            return str(ip)
    return address


def own_addresses(address: str) -> list[str]:
    """Return the addresses that this machine's own address or name has here; none if unknown."""
    try:
        return [str(ip) for ip in _resolve(address)]
    except (OSError, ValueError):
        return []


def _login_address() -> list[_Address]:
    """Return this machine's end of the SSH connection of this process, if there is one."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    try:
        ip = ipaddress.ip_address(words[2])
    except (IndexError, ValueError):
        return []
    match ip:
        case ipaddress.IPv6Address(ipv4_mapped=ipaddress.IPv4Address() as mapped):
            return [mapped]
    return [ip]


def interface_of(address: str) -> str:
    """Return the interface whose network contains an address; "lo" for loopback, "" for unknown."""
    try:
        ip = _resolve(address_for_others(address))[0]
    except (OSError, ValueError):
        return ""
    if ip.is_loopback:
        return "lo"
    return _by_route(ip) if ip.version == 4 else _by_address(ip)


def free_port(address: str) -> int:
    """Return a TCP port that is free on this address now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _resolve(address: str) -> list[_Address]:
    try:
        return [ipaddress.ip_address(address)]
    except ValueError:
        found = socket.getaddrinfo(address, None)
        return [ipaddress.ip_address(str(each[4][0])) for each in found]


def _by_route(ip: _Address) -> str:
    best = -1
    name = ""
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        fields = line.split()
        # Little-endian hexadecimal, as the kernel prints a network-order word.
        target = int.from_bytes(bytes.fromhex(fields[1]), "little")
        mask = int.from_bytes(bytes.fromhex(fields[7]), "little")
        if int(ip) & mask == target and mask > best:
            best = mask
            name = fields[0]
    return name


def _by_address(ip: _Address) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        fields = line.split()
        own = int(fields[0], 16)
        prefix_bits = int(fields[2], 16)
        network = ipaddress.ip_network((own, prefix_bits), strict=False)
        if ip in network:
            return fields[5]
    return ""
