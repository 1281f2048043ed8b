"""A limit on the memory of a pod on this machine: a memory cgroup, version 1 or 2, that all it starts stays in.

Where it would be passed the kernel ends one of the group, a rank first: the agents ask for that order.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.base.process import control_groups

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "workbench-"
# The limit first: version 1 refuses one on memory and swap together that is below it.
_FILES = {1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), 2: ("memory.max", "memory.swap.max")}
_REMOVE_S = 2.0
_FORGOTTEN_S = 60.0


def can_limit_memory() -> bool:
    """Whether this user may limit the memory of pods on this machine; tries it."""
    limit = MemoryLimit.make(f"try-{os.getpid()}", 1.0)
    if limit is None:
        return False
    limit.remove()
    return True


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    folder: Path

    @classmethod
    def make(cls, name: str, gib: float) -> MemoryLimit | None:
        """Make a group with a limit, and remove empty ones that a killed keeper has left."""
        for parent, version in _parents():
            _forget(parent)
            folder = parent / f"{_PREFIX}{name}"
            limit, swap = (folder / file for file in _FILES[version])
            try:
                folder.mkdir(exist_ok=True)
                limit.write_text(str(int(gib * 2**30)))
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            with contextlib.suppress(OSError):  # a kernel that counts no swap has no such file
                swap.write_text("0" if version == 2 else str(int(gib * 2**30)))
            return cls(folder)
        return None

    def take(self, pid: int) -> None:
        """Put a process, and all that it starts from now on, under the limit."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """Remove the group once its processes are gone; gives up after two seconds. Idempotent."""
        deadline = time.monotonic() + _REMOVE_S
        while self.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # busy for as long as the dead are not reaped
                self.folder.rmdir()
                return
            time.sleep(0.05)


def _parents() -> Iterator[tuple[Path, int]]:
    """Return the groups, with their versions, in which we may perhaps make one: our own, then the root that we see."""
    paths = control_groups()
    if "memory" in paths:
        yield from ((place, 1) for place in (_ROOT / "memory" / paths["memory"], _ROOT / "memory") if place.is_dir())
    elif "" in paths:
        yield from ((place, 2) for place in (_ROOT / paths[""], _ROOT) if place.is_dir())


def _forget(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # the kernel refuses for one that holds processes
            if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
                folder.rmdir()
