"""Carry checkpoints from the pods into the run directory while a run goes on: a pod that dies takes its disk along.

A thread of the keeper that fetches the newest checkpoint, one after another and never two at a time. What it misses,
because checkpoints come faster than the line carries them, is no loss: the next one is newer. A job that leaves its
checkpoints on the pods has nothing carried.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from workbench.keeper.checkpoints.collect import Returned, bring_checkpoints_back, record_on_pods
from workbench.keeper.link.context import RunContext

__all__ = ["CheckpointCollector"]

logger = logging.getLogger(__name__)
_LOOK_S = 0.5


class CheckpointCollector:
    """Fetch the checkpoints of one run."""

    def __init__(self, context: RunContext, saved: Callable[[], int]):
        self._context = context
        self._saved = saved
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="checkpoints", daemon=True)

    def start(self) -> None:
        """Begin to carry."""
        if self._brings and getattr(self._context.spec.job, "save_steps", None) is not None:
            self._thread.start()

    @property
    def _brings(self) -> bool:
        return getattr(self._context.spec.job, "checkpoints", "") == "bring"

    def finish(self, lost: Collection[str]) -> Returned:
        """Fetch what is still missing, or write down what stays on the pods, once no rank is left; blocks."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        return self._carry(lost) if self._saved() else Returned()

    def _loop(self) -> None:
        done = 0
        while not self._end.wait(_LOOK_S):
            if (step := self._saved()) > done:
                self._carry(())
                done = step

    def _carry(self, lost: Collection[str]) -> Returned:
        try:
            return (bring_checkpoints_back if self._brings else record_on_pods)(self._context, lost)
        except Exception as error:  # thread boundary; and the run's outcome must be written whatever happens here
            logger.exception("bringing back the checkpoints of %s", self._context.run_id)
            return Returned(notes=[f"its checkpoints could not be brought back: {error}"])
