"""Retry for some seconds while this process has no free thread or file descriptor."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from workbench.pods.pod import Report, no_report

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_T = TypeVar("_T")
PATIENCE_S = 10.0
"""Longest wait for a thread or a descriptor. Other programs of a user free theirs in seconds."""
TRANSFERS = 8
"""Number of transfers at a time. Login nodes limit the threads and processes of a user."""
_PAUSE_S = 0.2
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_NO_THREAD = "can't start new thread"


def missing(error: BaseException) -> str:
    """Name the missing resource of an error, or return an empty string for another error.

    The cause of the error counts too: a connection without a descriptor is a `RemoteError`.

    Example:
        >>> missing(RuntimeError("can't start new thread"))
        'thread'
        >>> missing(OSError(24, "Too many open files"))
        'file descriptor'
        >>> missing(OSError(28, "No space left on device"))
        ''
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTOR:
            return "file descriptor"
        if isinstance(cause, RuntimeError) and _NO_THREAD in str(cause):
            return "thread"
        cause = cause.__cause__
    return ""


def retry_on_exhaustion(action: Callable[[], _T], say: Report = no_report) -> _T:
    """Repeat an action that fails without a free thread or descriptor, for `PATIENCE_S` at most.

    `say` receives a hint for the user. Any other error is raised at once.
    """
    until = time.monotonic() + PATIENCE_S
    said = False
    while True:
        try:
            return action()
        except Exception as error:
            what = missing(error)
            if not what or time.monotonic() > until:
                raise
            if not said:
                said = True
                hint = f"waiting until the keeper has a free {what} (see ulimit -n and ulimit -u)"
                logger.warning("%s: %s", hint, error)
                say(hint)
        time.sleep(_PAUSE_S)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, and wait for a free one for `PATIENCE_S` at most. Raise RuntimeError."""
    retry_on_exhaustion(thread.start)


def in_threads(
    action: Callable[[_Item], _T], items: Sequence[_Item], at_once: int | None = None
) -> list[_T]:
    """Call a function once for every item, each in its own thread. Return the results in order.

    At most `at_once` calls run at the same time; None: all. A call that has begun ends before the
    first error is raised.
    """
    futures: list[Future[_T]] = []
    free = threading.Semaphore(at_once or max(1, len(items)))
    try:
        for item in items:
            free.acquire()
            future: Future[_T] = Future()
            future.add_done_callback(lambda _: free.release())
            start_thread(threading.Thread(target=call_into, args=(future, partial(action, item))))
            futures.append(future)
    finally:
        wait(futures)
    return [future.result() for future in futures]


def call_into(future: Future[_T], action: Callable[[], _T]) -> None:
    """Call a function and give its result or its error to a future."""
    try:
        result = action()
    except BaseException as error:  # Thread boundary: the caller raises the error.
        future.set_exception(error)
    else:
        future.set_result(result)
