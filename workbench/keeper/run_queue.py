"""Schedule the runs of a cluster on free pods, and close an unused cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from workbench.base.clock import now_s
from workbench.keeper.boundary import isolate_run_errors
from workbench.keeper.fleet import Fleet
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.run.runner import Runner

# A smaller shift of the announced end is not written.
_SHIFT_S = 10.0
logger = logging.getLogger(__name__)
_TICK_S = 1.0  # the end of a run and the end of the cluster are noticed at once


class IdleTime:
    """Time since the last use. The owner checks once a second while nothing runs."""

    def __init__(self, limit_s: float | None, announce: Callable[[], None]) -> None:
        self.end_s: float | None = None
        """Announced shutdown, in seconds since the epoch. None: no shutdown is scheduled."""
        self._limit_s = limit_s
        self._announce = announce
        self._used = time.monotonic()

    def use(self) -> None:
        self._used = time.monotonic()

    def suspend(self) -> None:
        """Cancel the announced shutdown. The next check announces a new time."""
        self.end_s = None
        self._announce()

    def is_over(self) -> bool:
        """Whether the limit is reached. Announces a new shutdown time if it moved."""
        if self._limit_s is None:
            return False
        left_s = self._used + self._limit_s - time.monotonic()
        if left_s > 0 and abs(now_s() + left_s - (self.end_s or 0)) > min(
            _SHIFT_S, self._limit_s / 10
        ):
            self.end_s = now_s() + left_s
            self._announce()
        return left_s <= 0


class RunQueue:
    """Waiting and running runs of a cluster. Runs start in order, on separate pods."""

    def __init__(self, fleet: Fleet, idle: IdleTime, closing: threading.Event):
        self.lock = threading.Condition()
        """Lock for changes of the waiting and running runs, and for closing the cluster."""
        self._fleet = fleet
        self._idle = idle
        self._closing = closing
        self._waiting: deque[Runner] = deque()
        self._running: list[Runner] = []

    @property
    def running(self) -> Sequence[Runner]:
        return tuple(self._running)

    @property
    def busy(self) -> list[AgentLink]:
        return [link for runner in self.running for link in runner.context.links]

    def add(self, runner: Runner) -> None:
        with self.lock:
            runner.enqueue()
            self._waiting.append(runner)
            self.lock.notify_all()

    def withdraw(self, runner: Runner) -> bool:
        """Cancel a waiting run. Return False if the run is not waiting, or may have ranks."""
        with self.lock:
            # Ranks of a dead keeper end only when the run has its turn.
            if runner not in self._waiting or runner.context.may_have_ranks:
                return False
            self._waiting.remove(runner)
            with isolate_run_errors(runner.context.run_id, "withdrawing the run"):
                runner.abandon("cancelled before its start")
            return True

    def run_in_order(self, end_when_idle: Callable[[], None], never_came: str) -> None:
        """Start runs in turn until the cluster closes, then wait for running runs."""
        self._idle.use()
        with self.lock:
            while not self._closing.is_set():
                if self._begin_next():
                    continue
                self.lock.wait(_TICK_S)
                if not self._waiting and not self._running and self._idle.is_over():
                    end_when_idle()
            self.lock.wait_for(lambda: not self._running)
        self.end_waiting(never_came)

    def end_waiting(self, why: str, error: Exception | None = None) -> None:
        """End the waiting runs: as failed after an error, otherwise as cancelled."""
        with self.lock:
            # No run is added after closing. A request may still withdraw a run.
            while self._waiting:
                runner = self._waiting.popleft()
                with isolate_run_errors(runner.context.run_id, "ending the run that never started"):
                    if error is not None:
                        runner.fail(error)
                    else:
                        runner.abandon(why)

    def _begin_next(self) -> bool:
        if not self._waiting:
            return False
        runner = self._waiting[0]
        busy = self.busy
        # A taken-over run can continue only on its own pods, as its ranks may be there.
        if runner.context.inherited:
            if any(link in busy for link in runner.context.links):
                return False
        elif (links := self._fleet.free(runner.wanted, busy)) is None:
            return False
        elif links != list(runner.context.links):
            with isolate_run_errors(
                runner.context.run_id, "moving the run to free pods", end=runner.fail
            ):
                runner.move(links)
            # The run's folder may be read-only or full.
            if runner.over:
                self._waiting.popleft()
                return True
        try:
            threading.Thread(target=self._run, args=(runner,), name="run", daemon=True).start()
        except RuntimeError as error:  # No thread can start now. The run waits for the next look.
            logger.warning("run %s waits: %s", runner.context.run_id, error)
            return False
        # The new thread needs the lock before its end, and the lock is held here.
        self._running.append(self._waiting.popleft())
        self._idle.suspend()
        return True

    def _run(self, runner: Runner) -> None:
        with isolate_run_errors(runner.context.run_id, "ending the run"):
            runner.run()
        with self.lock:
            self._running.remove(runner)
            self._idle.use()
            self.lock.notify_all()
