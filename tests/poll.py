"""The one way in which tests wait: until something holds, by a deadline on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object],
    within_s: float = 60.0,
    *,
    every_s: float = 0.02,
    why: Callable[[], object] | None = None,
) -> float:
    """Wait until something holds and return the seconds; after `within_s`, fail with `why()`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began >= within_s:
            raise AssertionError(
                f"it did not come true in {within_s:g} s" + (f": {why()}" if why else "")
            )
        time.sleep(every_s)
    return time.monotonic() - began
