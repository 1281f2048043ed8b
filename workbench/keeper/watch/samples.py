"""Samples of what a run uses on each pod, as events: memory of its ranks, and its GPUs where there are any."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.base.clock import now_s
from workbench.keeper.watch.pod import PodReport
from workbench.rundir.events import Event

_EVERY_S = 5.0
_LATER_S = 30.0  # once a run is an hour old, its curve needs no more
_HOUR_S = 3600.0
_GIB = 1024**3


class Sampler:
    """Turn some of the reports of a run's pods into events."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begun = clock()
        self._due: dict[str, float] = {}

    def see(self, report: PodReport) -> Event | None:
        """Take a report; return the event to write down, if it is time for one."""
        now = self._clock()
        running = [rank for rank in report.ranks if rank.phase == "running" and rank.rss_bytes]
        if not report.answered or not running or now < self._due.get(report.pod.name, 0.0):
            return None
        self._due[report.pod.name] = now + (_EVERY_S if now - self._begun < _HOUR_S else _LATER_S)
        data: dict[str, object] = {
            "pod": report.pod.name,
            "host": report.pod.address,
            "rss_gib": round(sum(rank.rss_bytes for rank in running) / _GIB, 4),
        }
        if report.gpus:
            data["gpus"] = [dict(gpu) for gpu in report.gpus]
        return Event(time_s=now_s(), rank=None, kind="sample", data=data)
