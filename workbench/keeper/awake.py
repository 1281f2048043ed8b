"""A clock that stands still while this machine sleeps or its processes are frozen: silence then is no one's fault."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_LATE_S = 5.0  # a look that comes so late was no busy processor
_TOLD_S = 60.0


class AwakeClock:
    """Seconds of a monotonic clock, without those in which nobody looked at it; several threads may."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._slept_s = 0.0
        self._last: tuple[float, float] | None = (
            None  # when it last woke, and after how many seconds
        )

    def __call__(self) -> float:
        """Return the seconds; `keep` must run in a thread, for only looks tell sleep from work."""
        with self._lock:
            now = self._clock()
            gap_s = now - self._looked
            self._looked = now
            if gap_s > _LATE_S:
                self._slept_s += gap_s
                self._last = now, gap_s
                logger.warning("this machine slept for %.0f s", gap_s)
            return now - self._slept_s

    def slept(self, within_s: float = _TOLD_S) -> str:
        """Return that this machine slept and for how long, if it woke within that time; else nothing."""
        self()
        if self._last is None or self._clock() - self._last[0] > within_s:
            return ""
        return f"this machine slept for {self._last[1]:.0f} s"

    def keep(self, over: threading.Event) -> None:
        """Look every second until it is over."""
        while not over.wait(_LOOK_S):
            self()


awake = AwakeClock()
"""The clock of this process."""
