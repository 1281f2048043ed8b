"""Why the pods of a start are not up yet, for how long their images are being pulled, and who one says it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.base.errors import PodError
from workbench.base.words import duration
from workbench.pods.guest.pod_main import REPORT
from workbench.pods.kubernetes.api import ApiRefusal, KubeApi
from workbench.pods.kubernetes.status import is_pulling, why

LOOK_S = 5.0
"""How often the time of a pull is told anew."""
_REPORT_S = 5.0
_LOG_LINES = 200
_LAST_LINES = 20


class Waits:
    """The reasons, by the pod's number; empty text where none is known."""

    def __init__(self) -> None:
        self.pulling = False
        """Whether a node pulls an image, which is not slow to start for that: the time does not count."""
        self._begun: dict[int, float] = {}

    def look(self, pods: Mapping[int, Mapping[str, Any] | None], events: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return the reason of every pod, given as the server shows it; None is not there yet."""
        now = time.monotonic()
        self._begun = {
            index: self._begun.get(index, now) for index, pod in pods.items() if pod and is_pulling(pod, events)
        }
        self.pulling = bool(self._begun)
        return {index: self._reason(index, pod, events, now) if pod else "" for index, pod in pods.items()}

    def _reason(self, index: int, pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: float) -> str:
        if index not in self._begun:
            return why(pod, events)
        told_s = (now - self._begun[index]) // LOOK_S * LOOK_S
        return f"pulling {pod['spec']['containers'][0]['image']}" + (f" for {duration(told_s)}" if told_s else "")


def listed(waits: Mapping[int, str]) -> str:
    return ", ".join(f"pod-{index}" + (f" ({reason})" if reason else "") for index, reason in waits.items())


def report_of(api: KubeApi, index: int, name: str, check_open: Callable[[], None]) -> str:
    """Find who a pod that is up says it is; its log may take a moment to be there."""
    deadline = time.monotonic() + _REPORT_S
    while True:
        text, trouble = "", None
        try:
            text = api.log(name, _LOG_LINES)
        except ApiRefusal as error:
            trouble = error
        reports = [line.removeprefix(REPORT) for line in text.splitlines() if line.startswith(REPORT)]
        if reports:
            return reports[-1]
        check_open()
        if trouble is not None and (trouble.status in (401, 403) or time.monotonic() > deadline):
            raise trouble
        if time.monotonic() > deadline:
            lines = "\n".join(text.splitlines()[-_LAST_LINES:]) or "(nothing)"
            raise PodError(f"pod-{index} is up, but its log does not say who it is:\n{lines}")
        time.sleep(0.1)
