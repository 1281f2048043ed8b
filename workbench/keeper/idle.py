"""How long nobody has used a cluster, and when it will close for that."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.base.clock import now_s

_SHIFT_S = 10.0  # of the announced end, that is worth writing down


class IdleTime:
    """Counts from the last use; whoever owns it looks at it several times a second while there is nothing to do."""

    def __init__(self, limit_s: float | None, announce: Callable[[], None]) -> None:
        self.end_s: float | None = None
        """The announced end, in seconds since the epoch; None where none is to come."""
        self._limit_s = limit_s
        self._announce = announce
        self._used = time.monotonic()

    def use(self) -> None:
        self._used = time.monotonic()

    def suspend(self) -> None:
        """Take the announced end back; the next look announces one again."""
        self.end_s = None
        self._announce()

    def is_over(self) -> bool:
        """Whether the limit is reached; announces the end where it has moved."""
        if self._limit_s is None:
            return False
        left_s = self._used + self._limit_s - time.monotonic()
        if left_s > 0 and abs(now_s() + left_s - (self.end_s or 0)) > min(_SHIFT_S, self._limit_s / 10):
            self.end_s = now_s() + left_s
            self._announce()
        return left_s <= 0
