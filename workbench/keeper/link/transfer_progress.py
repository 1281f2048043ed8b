"""Say of large files on their way how far they are, as the passing remark beside a run's state.

Only what takes more than two seconds is spoken of. It reads what the lines to the pods say of themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from workbench.keeper.link.agent import AgentLink
from workbench.keeper.link.transfer_status import Moving

__all__ = ["Telling", "words_of"]

_LOOK_S = 0.5
_SHOWN_S = 2.0
_MIB = 1 << 20


class Telling:
    """Speak for as long as the context is open."""

    def __init__(self, links: Sequence[AgentLink], say: Callable[[str], None], what: str):
        """Prepare."""
        self._links, self._say, self._what = links, say, what
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="telling", daemon=True)

    def __enter__(self) -> Telling:
        """Begin."""
        self._say(self._what)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """End, and take the remark back."""
        self._end.set()
        self._thread.join()
        self._say("")

    def _loop(self) -> None:
        while not self._end.wait(_LOOK_S):
            now = time.monotonic()
            moving = [(link.pod.name, each) for link in self._links if (each := link.moving) is not None]
            said = [words_of(each, name, now) for name, each in moving if now - each.began_at >= _SHOWN_S]
            self._say("; ".join([self._what, *said] if self._what else said))


def words_of(moving: Moving, pod: str, now: float) -> str:
    """Return how far a file is, how fast it goes and how long it will take.

    Example:
        >>> file = Moving(name="model.safetensors", done=300 << 20, size=1 << 30, begun=0, began_at=10.0)
        >>> words_of(file, "pod-0", 40.0)
        'model.safetensors (pod-0) 300 of 1024 MiB, 10.0 MiB/s, 72 s left'
    """
    pace = (moving.done - moving.begun) / max(now - moving.began_at, 0.1)
    said = f"{moving.name} ({pod}) {moving.done // _MIB} of {moving.size // _MIB} MiB"
    if pace < 1:
        return f"{said}, standing still"
    return f"{said}, {pace / _MIB:.1f} MiB/s, {(moving.size - moving.done) / pace:.0f} s left"
