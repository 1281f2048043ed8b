"""Memory of ranks that consist of several processes, as watched by a pod's agent.

The kernel walks all page tables of a process for its exact share of memory, some 20 ms for every
GiB, and holds the lock of the process's memory meanwhile. Exact shares are therefore read seldom,
and in a fork. In between, the sizes of every second are compared with the last exact sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from workbench.agent.machine import Resident, resident
from workbench.agent.tasks import Answer, Tasks
from workbench.base.process import kernel_text

_EVERY_S = 60.0
_BUDGET_S = 1.0  # CPU time of a look
_SKIPPED_S = 1800.0  # pause after a look that was more expensive
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Share:
    """A process's share of memory when first seen, or at the last exact look."""

    own_bytes: int
    shared_bytes: int
    then: Resident
    """Its sizes at that time."""


class MemoryWatch:
    """The exact shares of memory of all ranks of a pod."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._task: int | None = None
        self._due = 0.0
        self._shares: dict[int, _Share] = {}

    def total(self, sizes: Mapping[int, Resident], parents: Mapping[int, int]) -> int:
        """Return the resident bytes of a rank's processes. Pages shared with a fork count once.

        A process that no exact look has seen yet may share all pages that its parent had.
        """
        if len(sizes) < 2:
            return sum(size.bytes for size in sizes.values())
        own = 0
        shared = 0
        more_shared = 0
        for pid, size in sizes.items():
            if pid not in self._shares:
                parent = sizes.get(parents.get(pid, 0))
                known_bytes = parent.own_bytes if parent else 0
                self._shares[pid] = _Share(0, 0, Resident(known_bytes, known_bytes, 0))
            share = self._shares[pid]
            own += max(0, share.own_bytes + size.own_bytes - share.then.own_bytes)
            shared += share.shared_bytes
            more_shared = max(more_shared, size.shared_bytes - share.then.shared_bytes)
        highest = sum(size.bytes for size in sizes.values())
        largest = max(size.bytes for size in sizes.values())
        return min(highest, max(largest, own + shared + more_shared))

    def look(self, families: Sequence[Collection[int]]) -> None:
        """Take the result of an exact look, and begin the next if one is due. Never waits.

        Args:
            families: The pids of every rank. A single process is not looked at.
        """
        pids = [pid for family in families if len(family) > 1 for pid in family]
        if self._task is not None:
            answer = self._tasks.result(self._task)
            if answer is None:
                return
            self._task = None
            self._take(answer)
        live = {pid for family in families for pid in family}
        self._shares = {pid: share for pid, share in self._shares.items() if pid in live}
        now = time.monotonic()
        if pids and now >= self._due:
            self._due = now + _EVERY_S
            self._task = self._tasks.begin(lambda: _exact_shares(pids))

    def _take(self, answer: Answer) -> None:
        rows = cast("list[list[int]]", answer.get("shares", []))
        for pid, own, shared, then, then_shared in rows:
            self._shares[pid] = _Share(own, shared, Resident(then, then, then_shared))
        if answer.get("is_expensive") or "error" in answer:
            _log.info("memory of ranks: an exact look is too expensive: %s", answer)
            self._due = time.monotonic() + _SKIPPED_S


def _exact_shares(pids: Sequence[int]) -> Answer:
    """Read exact shares until the budget of CPU time is used. Runs in a fork."""
    shares: list[list[int]] = []
    began_s = time.process_time()
    used_s = 0.0
    for pid in pids:
        if used_s > _BUDGET_S:
            break
        exact = _exact_share(pid)
        size = resident(pid)
        if exact is not None and size.bytes:
            own, shared = exact
            shares.append([pid, own, shared, size.bytes, size.shared_bytes])
        used_s = time.process_time() - began_s
    # A single large process can use more than the budget, also as the last.
    return {"shares": shares, "is_expensive": used_s > _BUDGET_S}


def _exact_share(pid: int) -> tuple[int, int] | None:
    """Return a process's share of memory in bytes: without shared memory, and shared memory.

    A page of several processes is divided by their number (PSS). None: the share cannot be read.
    """
    lines = kernel_text(f"/proc/{pid}/smaps_rollup").splitlines()
    sizes = dict(line.split(":", 1) for line in lines[1:])
    if "Pss" not in sizes:
        return None
    whole, shared = (int(sizes.get(name, "0").split()[0]) * 1024 for name in ("Pss", "Pss_Shmem"))
    return whole - shared, shared
