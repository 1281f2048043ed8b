"""A clock that never jumps: the time of day at the start of agent or keeper, plus seconds since."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache

Clock = Callable[[], float]
"""A clock in seconds: monotonic, without the sleep of the machine, or a test's own."""
CLOCK_MARK = "WORKBENCH_BOOTED_S"
"""Variable with the agent's time base, for its child processes."""


def now_s() -> float:
    """Return the seconds since 1970-01-01 00:00 UTC, which never go back."""
    return _since_boot_s() + _booted_s()


def share_clock() -> None:
    """Share the clock with future child processes."""
    os.environ[CLOCK_MARK] = repr(_booted_s())


@cache
def _booted_s() -> float:
    """Return the boot time of the machine, by the clock at the first call."""
    try:
        return float(os.environ[CLOCK_MARK])
    except (KeyError, ValueError):
        return time.time() - _since_boot_s()


def _since_boot_s() -> float:
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):  # not Linux
        return time.monotonic()
