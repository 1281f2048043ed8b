"""What the kernel's out-of-memory killer did: its counters and the limit, under cgroup version 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base.process import control_groups

_ROOT = Path("/sys/fs/cgroup")
_COUNTERS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_HIGHEST = ("memory.peak", "memory.max_usage_in_bytes")
_FULL = 0.99
_UNLIMITED_BYTES = 1 << 60


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
