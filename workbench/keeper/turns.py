"""Which runs of a cluster wait and which run, each on the first free pods, and when a cluster closes unused."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from workbench.base.clock import now_s
from workbench.keeper.fleet import Fleet
from workbench.keeper.link.agent import AgentLink
from workbench.keeper.run.runner import Runner

_SHIFT_S = 10.0  # of the announced end, that is worth writing down
logger = logging.getLogger(__name__)
_TICK_S = 0.25


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
        if left_s > 0 and abs(now_s() + left_s - (self.end_s or 0)) > min(
            _SHIFT_S, self._limit_s / 10
        ):
            self.end_s = now_s() + left_s
            self._announce()
        return left_s <= 0


class Turns:
    """The runs that wait, and those that run beside each other on pods of their own. No run overtakes another."""

    def __init__(self, fleet: Fleet, idle: IdleTime, closing: threading.Event):
        self.lock = threading.Condition()
        """Held by whoever changes who waits and who runs, or closes the cluster."""
        self._fleet, self._idle, self._closing = fleet, idle, closing
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
        """End a run that waits as cancelled; False where it does not wait."""
        with self.lock:
            if runner not in self._waiting:
                return False
            self._waiting.remove(runner)
            runner.abandon("cancelled before it started")
            return True

    def take(self, end_when_idle: Callable[[], None], never_came: str) -> None:
        """Let runs take their turns until the cluster closes, and wait for those that run then."""
        self._idle.use()
        with self.lock:
            while not self._closing.is_set():
                if self._begin_next():
                    continue
                self.lock.wait(_TICK_S)
                if not self._waiting and not self._running and self._idle.is_over():
                    end_when_idle()
            self.lock.wait_for(lambda: not self._running)
        for runner in self._waiting:  # nobody adds to it any more
            runner.abandon(never_came)

    def _begin_next(self) -> bool:
        if not self._waiting:
            return False
        runner, busy = self._waiting[0], self.busy
        if runner.context.left:  # it can only go on where it is, for its ranks may be there
            if any(link in busy for link in runner.context.links):
                return False
        elif (links := self._fleet.free(len(runner.context.links), busy)) is None:
            return False
        elif links != list(runner.context.links):
            try:
                runner.move(links)
            except Exception as error:  # run boundary: its folder may be read-only, stale or full
                logger.exception("run %s", runner.context.run_id)
                self._waiting.popleft()
                runner.fail(error)
                return True
        try:
            threading.Thread(target=self._carry, args=(runner,), name="run", daemon=True).start()
        except (
            RuntimeError
        ) as error:  # no thread can start at this moment: the run waits for the next look
            logger.warning("run %s waits: %s", runner.context.run_id, error)
            return False
        self._running.append(
            self._waiting.popleft()
        )  # the thread needs the lock, held here, before it ends
        self._idle.suspend()
        return True

    def _carry(self, runner: Runner) -> None:
        try:
            runner.run()
        except Exception:  # run boundary: the pods and the other runs live on
            logger.exception("a run")
        with self.lock:
            self._running.remove(runner)
            self._idle.use()
            self.lock.notify_all()
