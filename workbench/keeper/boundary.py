"""The boundary around a run or a pod: its error reaches neither the keeper nor other runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workbench.base.errors import WorkbenchError

logger = logging.getLogger(__name__)
_last: dict[tuple[str, str], str] = {}
"""Last logged error of a run or pod and an action: some actions are repeated every few seconds."""


@contextmanager
def isolate_run_errors(
    run_id: str, doing: str, end: Callable[[Exception], object] | None = None
) -> Iterator[None]:
    """Guard an action of the keeper on a run. The block ends at its first error.

    Args:
        run_id: The run.
        doing: The action, for the keeper's log.
        end: Function that ends the run because of the error. None: the run continues, or is over.
    """
    try:
        yield
    except Exception as error:  # Run boundary: the pods and the other runs continue.
        words = f"{type(error).__name__}: {error}"
        if _last.get((run_id, doing)) != words:
            logger.exception("run %s: %s", run_id, doing)
        _last[run_id, doing] = words
        try:
            if end is not None:
                end(error)
        # Run boundary: the run may be without a result, and the keeper continues.
        except Exception:
            logger.exception("run %s: ending the run", run_id)
    else:
        _last.pop((run_id, doing), None)


@contextmanager
def isolate_pod_errors(pod: str, doing: str) -> Iterator[None]:
    """Guard an action on a pod that the keeper can do without. The log has each error once."""
    try:
        yield
    except (WorkbenchError, OSError) as error:
        if _last.get((pod, doing)) != str(error):
            logger.warning("%s: %s: %s", pod, doing, error)
        _last[pod, doing] = str(error)
    else:
        _last.pop((pod, doing), None)
