"""The memory of processes as /proc shows it, their limits, and what the kernel's out-of-memory killer did."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
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


def memory(pid: int) -> tuple[int, int]:
    """Return a process's resident memory now and at its highest, in bytes; zeros once it has gone."""
    now = peak = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        now = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE_BYTES
        status = Path(f"/proc/{pid}/status").read_bytes()
        at = status.find(b"VmHWM:")
        peak = int(status[at:].split(None, 2)[1]) * 1024 if at >= 0 else now
    return now, max(now, peak)


def family_memory(sizes: Mapping[int, int]) -> int:
    """Return the resident bytes of several processes, by pid; what a fork and its parent share counts once."""
    if len(sizes) < 2:
        return sum(sizes.values())
    shares = {pid: _share(pid) for pid in sizes}
    return max(*sizes.values(), sum(size if (share := shares[pid]) is None else share for pid, size in sizes.items()))


def _share(pid: int) -> int | None:
    """Return a process's pages, each divided by how many processes have it (PSS); None where that cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        return int(text[text.index(b"\nPss:") :].split(None, 2)[1]) * 1024
    return None


def memory_group(pid: int, *, ended: bool = False) -> Path | None:
    """Return the folder of the memory cgroup that a process is in, or None."""
    paths = {name: path.removesuffix(" (deleted)") for name, path in control_groups(pid).items()}
    # Inside a container the path may be the host's, while the mount shows only the container's own group.
    candidates = [_ROOT / "memory" / paths["memory"], _ROOT / "memory"] if "memory" in paths and not ended else []
    if "" in paths:
        candidates += [_ROOT / paths[""], _ROOT / "unified" / paths[""], _ROOT]
    return next((path for path in candidates if _counter(path) is not None), None)


def memory_limit_bytes(pid: int) -> int | None:
    """Return the least limit of the memory groups around a process, in bytes; None where there is none."""
    group = memory_group(pid)
    around = [] if group is None else [path for path in (group, *group.parents) if path.is_relative_to(_ROOT)]
    return min((limit for path in around if (limit := _limit_bytes(path)) is not None), default=None)


@dataclass(slots=True)
class OomWatch:
    """The out-of-memory kills in the groups that our processes were seen in."""

    _before: dict[Path, int] = field(default_factory=dict)

    def see(self, pid: int, *, ended: bool = False) -> Path | None:
        group = memory_group(pid, ended=ended)
        if group is not None and group not in self._before:
            self._before[group] = 0 if ended else _counter(group) or 0
        return group

    def counts(self) -> Mapping[Path, int]:
        return {group: max(0, (_counter(group) or 0) - before) for group, before in self._before.items()}

    def may_follow(self) -> bool:
        """Whether a kill may still be counted: a group has been as full as its limit allows."""
        for group in self._before:
            limit, highest = _limit_bytes(group), _first_number(group, _HIGHEST)
            if limit is not None and highest is not None and highest >= _FULL * limit:
                return True
        return False

    def hint(self, group: Path | None) -> str:
        """Return that a process of this group was killed for its memory, where the counter says so; else nothing."""
        counts = self.counts()
        full = group if group is not None and counts.get(group) else max(counts, key=lambda g: counts[g], default=None)
        kills = counts[full] if full is not None else 0
        if full is None or not kills:
            return ""
        limit = _limit_bytes(full)
        at = f" of {limit / 2**20:.0f} MiB" if limit else ""
        return f"out of memory: the memory limit{at} was reached (oom_kill counter +{kills})"


def _counter(group: Path) -> int | None:
    for name in _COUNTERS:
        try:
            pairs = (line.split() for line in (group / name).read_text().splitlines())
            kills = [int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"]
        except (OSError, ValueError):
            continue
        if kills:
            return kills[0]
    return None


def _limit_bytes(group: Path) -> int | None:
    value = _first_number(group, _LIMITS)
    return value if value is not None and value < _UNLIMITED_BYTES else None


def _first_number(group: Path, names: Sequence[str]) -> int | None:
    for name in names:
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):
            continue
    return None
