"""Monotonic clock that stops while this machine sleeps or its processes are frozen.

Silence during sleep is not the fault of a pod, so timeouts must not count such time.
"""

from __future__ import annotations

import logging
import threading
import time

from workbench.base.clock import Clock

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
# A busy processor never delays a look for so long.
_LATE_S = 5.0
_TOLD_S = 60.0
# Linux stops the monotonic clock in a suspended machine, and continues this clock.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _since_boot() -> float:
    return time.clock_gettime(_BOOT_CLOCK)


class AwakeClock:
    """Count the seconds since boot without pauses in the clock's use. Thread-safe."""

    def __init__(self, clock: Clock = _since_boot) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = clock()
        self._slept_s = 0.0
        # Time of the last wake-up, and length of the sleep in seconds.
        self._last: tuple[float, float] | None = None

    def __call__(self) -> float:
        """Return the seconds awake. Requires `keep` in a thread: missing looks mean sleep."""
        with self._lock:
            now = self._clock()
            gap_s = now - self._looked
            self._looked = now
            if gap_s > _LATE_S:
                self._slept_s += gap_s
                self._last = now, gap_s
                logger.warning("this machine slept for %.0f s", gap_s)
            return now - self._slept_s

    def slept(self, within_s: float = _TOLD_S, at_least_s: float = 0.0) -> str:
        """Describe the last sleep if the machine woke within `within_s`. Otherwise return "".

        A sleep shorter than `at_least_s` is ignored.
        """
        self()
        if self._last is None:
            return ""
        woken, slept_s = self._last
        if slept_s < at_least_s or self._clock() - woken > within_s:
            return ""
        return f"this machine slept for {slept_s:.0f} s"

    def keep(self, over: threading.Event) -> None:
        """Look at the clock every second until `over` is set."""
        while not over.wait(_LOOK_S):
            self()


uptime_clock = AwakeClock()
"""Shared clock of the process."""
