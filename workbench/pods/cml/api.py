"""Cloudera ML's `cml.workers_v1`, its refusals made into our errors.

The module exists only inside a session there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.errors import BackendError, ConfigError
from workbench.base.process import Process
from workbench.pods.cml.worker import ADDRESS, own_address

_ENDED = {
    "failed",
    "stopped",
    "stopping",
    "timedout",
    "timeout",
    "succeeded",
    "finished",
    "exited",
    "killed",
}


class WorkersApi:
    def find(self) -> Any:
        why = "there is no module cml.workers_v1"
        try:
            from cml import workers_v1  # type: ignore[import-not-found]

            why = f"{ADDRESS} is not set"
            own_address()
        except (ImportError, KeyError) as error:
            raise ConfigError(
                f"CMLPods works only inside a session of Cloudera ML; {why}. Open the notebook"
                " in a session, or use LocalPods, SSHPods or KubernetesPods"
            ) from error
        return workers_v1

    def call(self, verb: str, *args: object, **options: object) -> Any:
        module = self.find()
        try:
            return getattr(module, verb)(*args, **options)
        except (
            Exception
        ) as error:  # the module documents no errors of its own; these are the platform's words
            if _is_late(error):
                raise BackendError(
                    f"Cloudera ML did not answer {verb} in time: {error}; try again"
                ) from error
            raise BackendError(f"Cloudera ML refused {verb}: {error}") from error


def _is_late(error: Exception) -> bool:
    """Whether an error is a time-out; those of requests and httpx are no TimeoutError."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return any(name.endswith(("Timeout", "TimeoutError", "TimeoutException")) for name in names)


def has_ended(worker: Mapping[str, object]) -> bool:
    """Return whether a worker has ended, according to the platform."""
    return str(worker.get("status", "")).lower() in _ENDED


def words_of(worker: Mapping[str, object]) -> str:
    """Return the platform's description of a worker, without fields that may be secret.

    Example:
        >>> ended = {"id": 7, "status": "failed", "reason": "no such image"}
        >>> words_of({**ended, "env": {"TOKEN": "x"}})
        'status failed, reason no such image'
    """
    shown = {
        key: value
        for key, value in worker.items()
        if key not in ("id", "app_url", "env", "code") and value
    }
    return ", ".join(f"{key} {value}" for key, value in shown.items()) or "it gives no reason"


def worker_ids(ids: Mapping[str, object]) -> list[object]:
    """Return the platform's ids of the workers, without pod 0 where the session is pod 0."""
    return [worker for worker in ids.values() if not isinstance(worker, Mapping)]


def own_process(ids: Mapping[str, object]) -> Process | None:
    """Return the process of pod 0 where the session is pod 0; else None."""
    match ids.get("pod-0"):
        case {"pid": int(pid), "start_time": int(start_time)}:
            return Process(pid=pid, start_time=start_time)
    return None
