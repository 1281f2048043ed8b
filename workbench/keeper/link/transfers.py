"""How far large files are on their way, said beside a run's state once one takes more than two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.pods.pod import Pod

_LOOK_S = 0.5
_SHOWN_S = 2.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferStatus:
    name: str
    done: int
    """Bytes that are over."""
    size: int
    begun: int
    """Bytes that an earlier try had brought over."""
    began_at: float
    """When this one began, on the clock of `time.monotonic`."""


class Carrier(Protocol):
    transfer: TransferStatus | None

    @property
    def pod(self) -> Pod: ...


class TransferProgress:
    """Report transfers for as long as the context is open."""

    def __init__(self, links: Sequence[Carrier], report: Callable[[str], None], what: str):
        self._links, self._report, self._what = links, report, what
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="transfers", daemon=True)

    def __enter__(self) -> TransferProgress:
        self._report(self._what)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._report("")

    def say(self, what: str) -> None:
        """Report something else beside the transfers from now on."""
        self._what = what

    def _loop(self) -> None:
        while not self._end.wait(_LOOK_S):
            now = time.monotonic()
            moving = [(link.pod.name, each) for link in self._links if (each := link.transfer) is not None]
            lines = [progress_text(each, name, now) for name, each in moving if now - each.began_at >= _SHOWN_S]
            self._report("; ".join([self._what, *lines] if self._what else lines))


def progress_text(transfer: TransferStatus, pod: str, now: float) -> str:
    """Return how far a file is, how fast it goes and how long it will take.

    Example:
        >>> file = TransferStatus(name="model.safetensors", done=300 << 20, size=1 << 30, begun=0, began_at=10.0)
        >>> progress_text(file, "pod-0", 40.0)
        'model.safetensors (pod-0) 300 of 1024 MiB, 10.0 MiB/s, 72 s left'
    """
    pace = (transfer.done - transfer.begun) / max(now - transfer.began_at, 0.1)
    text = f"{transfer.name} ({pod}) {transfer.done // _MIB} of {transfer.size // _MIB} MiB"
    if pace < 1:
        return f"{text}, standing still"
    return f"{text}, {pace / _MIB:.1f} MiB/s, {(transfer.size - transfer.done) / pace:.0f} s left"
