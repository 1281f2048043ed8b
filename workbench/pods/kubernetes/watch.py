"""Kubernetes objects, kept up to date in a thread: a list, then a watch.

A watch that broke or is too old (410) starts again with a list, so no deletion is missed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from workbench.base.errors import WorkbenchError
from workbench.base.messages.wire import shut_down
from workbench.pods.kubernetes.api import ApiRefusal, Kind, KubeApi

_LOG = logging.getLogger(__name__)
_BREAK_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_BREATH_S = 0.02
_GONE = 410
_ENDED = ("Succeeded", "Failed")


class WatchedObjects:
    """Objects of a kind and a selector, by uid."""

    def __init__(self, api: KubeApi, kind: Kind, changed: threading.Condition, **selector: str):
        self.objects: dict[str, Mapping[str, Any]] = {}
        """Existing objects by uid, in the order of discovery. Hold the lock to read them."""
        self.gone: dict[str, tuple[Mapping[str, Any], float]] = {}
        """Deleted objects by uid: the last known state, and the time of the deletion in seconds
        since the epoch."""
        self.error: WorkbenchError | None = None
        """Why the watch stands still; None while it goes."""
        self._error_since_s = 0.0
        self.changes = 0
        self._api = api
        self._kind = kind
        self._changed = changed
        self._selector = selector
        self._response: Any = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"watch of {kind}s", daemon=True)
        self._thread.start()

    @property
    def names(self) -> set[str]:
        """Names of the existing objects. Hold the lock to read them."""
        return {_name(item) for item in self.objects.values()}

    @property
    def alive(self) -> set[str]:
        """Names of the existing objects that have not ended. Hold the lock to read them."""
        return {
            _name(item)
            for item in self.objects.values()
            if (item.get("status") or {}).get("phase") not in _ENDED
        }

    def trouble(self, least_s: float) -> str:
        """Return the reason for a silent server; empty while the server answers.

        Hold the lock to call.
        """
        if self.error is None or time.monotonic() - self._error_since_s < least_s:
            return ""
        return str(self.error)

    def close(self) -> None:
        self._closed.set()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)

    def _wake(self) -> None:
        """Wake the reader of the watch by shutting its socket down."""
        connection = getattr(self._response, "connection", None)
        line = getattr(connection, "sock", None)
        if line is not None:
            shut_down(line)

    def _keep(self) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                version = self._list()
                failures = 0
                # The wait prevents a storm at a server that ends every watch at once.
                while not self._closed.wait(_BREATH_S):
                    version = self._follow(version)
            except _Stale:
                continue
            except Exception as error:  # thread boundary: it must not end before it is closed
                if self._closed.is_set():
                    return
                if not self._error_since_s:  # one line as it breaks, none for each try after that
                    _LOG.warning("the watch of %ss broke: %s", self._kind, error)
                with self._changed:
                    self._error_since_s = self._error_since_s or time.monotonic()
                    self.error = error if isinstance(error, WorkbenchError) else None
                    self._notify()
                step = min(failures, len(_BREAK_S) - 1)
                self._closed.wait(_BREAK_S[step])
                failures += 1

    def _list(self) -> str:
        items, version = self._api.list(self._kind, **self._selector)
        listed = {_uid(item): item for item in items}
        if self._error_since_s:
            _LOG.info(
                "the watch of %ss goes again after %.0f s",
                self._kind,
                time.monotonic() - self._error_since_s,
            )
        with self._changed:
            deleted = [uid for uid in self.objects if uid not in listed]
            for uid in deleted:
                self._forget(uid)
            self.objects.update(listed)
            self.error = None
            self._error_since_s = 0.0
            self._notify()
        return version

    def _follow(self, version: str) -> str:
        """Apply changes until the server ends the watch; return the version to continue from."""
        try:
            response = self._api.watch(self._kind, version, **self._selector)
            self._response = response
        except ApiRefusal as error:
            if error.status == _GONE:
                raise _Stale from error
            raise
        if self._closed.is_set():
            self._wake()
        try:
            for line in response:
                if line.strip():
                    event = self._api.read(line)
                    version = self._apply(event, version)
            return version
        finally:
            response.close()
            response.release_conn()

    def _apply(self, event: Mapping[str, Any], version: str) -> str:
        item = event["object"]
        if event["type"] == "ERROR":
            if item.get("code") == _GONE:
                raise _Stale
            raise ApiRefusal(
                f"the watch of {self._kind}s broke: {item.get('message')}",
                int(item.get("code") or 0),
            )
        if event["type"] != "BOOKMARK":
            with self._changed:
                uid = _uid(item)
                self.objects[uid] = item
                if event["type"] == "DELETED":
                    self._forget(uid)
                self._notify()
        metadata = item.get("metadata", {})
        return str(metadata.get("resourceVersion") or version)

    def _notify(self) -> None:
        self.changes += 1
        self._changed.notify_all()

    def _forget(self, uid: str) -> None:
        self.gone[uid] = (self.objects.pop(uid), time.time())


class _Stale(Exception):
    """The place in the server's history from which to continue is gone."""


def _uid(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("uid", ""))


def _name(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])
