"""Which cores each rank gets that trains on CPUs, where its pod has cores of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence

_log = logging.getLogger(__name__)
_CHOSEN = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables by which a user binds threads to cores; then nothing else does."""


def shares(cores: Collection[int], ranks: int, threads: int) -> Sequence[Sequence[int]]:
    """Share cores evenly among the ranks of a pod; none where there is one rank, or a share is less than its threads.

    Example:
        >>> shares({0, 1, 2, 3, 4}, ranks=2, threads=2), shares({0, 1}, ranks=2, threads=2)
        ([[0, 1], [2, 3]], [])
    """
    size = len(cores) // ranks
    if ranks < 2 or size < threads:
        return []
    ordered = sorted(cores)
    return [ordered[n * size : (n + 1) * size] for n in range(ranks)]


def bind(pid: int, local_rank: int, ranks: int, threads: int, binding: str, env: Mapping[str, str]) -> None:
    """Bind a rank that has just started to its share; `binding` is that of the request."""
    try:
        cores = os.sched_getaffinity(0)
        own = binding == "always" or (binding == "cpuset" and len(cores) < (os.cpu_count() or 1))
        if not own or not env.keys().isdisjoint(_CHOSEN):
            return
        if local_rank < len(given := shares(cores, ranks, threads)):
            os.sched_setaffinity(pid, given[local_rank])
    except OSError as error:  # it has ended, or the pod may not
        _log.info("local rank %d is not bound to cores: %s", local_rank, error)
