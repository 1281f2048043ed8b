"""Time that never jumps: the time of day when this machine's agent or keeper began, and the seconds since."""

from __future__ import annotations

import os
import time
from functools import cache

CLOCK_MARK = "WORKBENCH_BOOTED_S"
"""The variable by which what an agent starts counts from the same time of day as it does."""


def now_s() -> float:
    """Return the seconds since 1970-01-01 00:00 UTC, which never go back."""
    return _since_boot_s() + _booted_s()


def share_clock() -> None:
    """Let what this process starts from now on have the same clock."""
    os.environ[CLOCK_MARK] = repr(_booted_s())


@cache
def _booted_s() -> float:
    """Return when this machine was started, by the clock as it stood at the first look."""
    try:
        return float(os.environ[CLOCK_MARK])
    except (KeyError, ValueError):
        return time.time() - _since_boot_s()


def _since_boot_s() -> float:
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):  # not Linux
        return time.monotonic()
