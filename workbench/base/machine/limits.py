"""Limits of the machine for a process: processor cores and memory, by control groups.

Standard library and parts of `base/`, as the text also travels to hosts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from workbench.base.process import control_groups, kernel_text

_ROOT = Path("/sys/fs/cgroup")
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED_BYTES = 1 << 60


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
        if kills_in(folder) is not None:
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
        limit = limit_in_bytes(folder)
        if limit is not None:
            limits.append(limit)
    return min(limits, default=None)


def most_memory_gib() -> float | None:
    """Return the memory of the machine, or less by a limit, in GiB; None: unknown."""
    limit = memory_limit_bytes(os.getpid())
    found = [memory_gib("MemTotal"), None if limit is None else limit / 2**30]
    return min((each for each in found if each is not None), default=None)


def memory_gib(name: str) -> float | None:
    """Return a size of `/proc/meminfo` in GiB, such as `MemAvailable`; None: unknown."""
    sizes = dict(line.split(":", 1) for line in kernel_text("/proc/meminfo").splitlines())
    return int(sizes[name].split()[0]) / 2**20 if sizes else None


def cores() -> float:
    """Return the usable processor cores: the CPU set, or less by a quota."""
    limits = [float(len(os.sched_getaffinity(0)))]
    paths = control_groups(os.getpid())
    groups = [
        _ROOT / paths.get("", "").removesuffix(" (deleted)"),
        _ROOT / "cpu" / paths.get("cpu", ""),
        _ROOT / "cpu",
    ]
    for group in groups:
        for folder in (group, *group.parents):
            if folder.is_relative_to(_ROOT):
                limits += _quota(folder)
    return min(limits)


def _quota(group: Path) -> list[float]:
    """Return the limit of a group in cores, in either version's form; empty for none."""
    words: list[str] = []
    for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        words += kernel_text(group / name).split()
    # "max" and -1 mean no limit.
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return []
    quota, period = map(int, words)
    return [quota / period]


def kills_in(group: Path) -> int | None:
    """Return the number of out-of-memory kills in a group; None: the group has no counter."""
    for name in _COUNTERS:
        for line in kernel_text(group / name).splitlines():
            counter, _, kills = line.partition(" ")
            if counter == "oom_kill" and kills.isdecimal():
                return int(kills)
    return None


def limit_in_bytes(group: Path) -> int | None:
    """Return a group's limit of memory; None: no limit."""
    value = first_number(group, _LIMITS)
    if value is None or value >= _UNLIMITED_BYTES:
        return None
    return value


def first_number(group: Path, names: Sequence[str]) -> int | None:
    """Return the number of the first of a group's files with a number, else None."""
    for name in names:
        number = kernel_text(group / name).strip()
        if number.isdecimal():  # "max" has no number
            return int(number)
    return None
