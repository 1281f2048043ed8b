"""The one way in which tests wait: until something holds, by a deadline on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S = 600.0  # of every wait: a busy machine takes many times as long as an idle one


def until(
    condition: Callable[[], object],
    within_s: float = LEAST_S,
    *,
    every_s: float = 0.02,
    why: Callable[[], object] | None = None,
) -> float:
    """Wait until something holds and return the seconds; fail with `why()` when it never does.

    The deadline ends a test that hangs. No test learns from it how fast a machine is.
    """
    began = time.monotonic()
    within_s = max(within_s, LEAST_S)
    while not condition():
        if time.monotonic() - began >= within_s:
            raise AssertionError(
                f"it did not come true in {within_s:g} s" + (f": {why()}" if why else "")
            )
        time.sleep(every_s)
    return time.monotonic() - began
