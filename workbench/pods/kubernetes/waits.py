"""Why the pods of a start are not up yet, and for how long their images are being pulled by this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.base.words import duration
from workbench.pods.kubernetes.status import is_pulling, why

LOOK_S = 5.0
"""How often the time of a pull is told anew."""


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
    """Return pods with their reasons as one text."""
    return ", ".join(f"pod-{index}" + (f" ({reason})" if reason else "") for index, reason in waits.items())
