"""A clock that a test sets forward: what waits for a deadline reaches it without waiting."""

from __future__ import annotations

import time
from typing import Any


class HurriedClock:
    """The module `time`, whose monotonic clock is some seconds ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
