"""Monotonic clock that stops while this machine sleeps or its processes are frozen.

Silence during sleep is not the fault of a pod, so timeouts must not count such time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
# A busy processor never delays a look for so long.
_LATE_S = 5.0
_TOLD_S = 60.0


class AwakeClock:
    """Count seconds of a monotonic clock without pauses in its use. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
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

    def slept(self, within_s: float = _TOLD_S) -> str:
        """Describe the last sleep if the machine woke within `within_s`. Otherwise return ""."""
        self()
        if self._last is None or self._clock() - self._last[0] > within_s:
            return ""
        return f"this machine slept for {self._last[1]:.0f} s"

    def keep(self, over: threading.Event) -> None:
        """Look at the clock every second until `over` is set."""
        while not over.wait(_LOOK_S):
            self()


awake = AwakeClock()
"""Shared clock of the process."""
