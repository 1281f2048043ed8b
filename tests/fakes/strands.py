"""Threads of which one runs at a time: a seed draws the next wherever a thread may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType

_MOST = 200_000  # turns of a history
_STUCK_S = 120.0  # a strand that has its turn and waits for a real lock


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Strand:
    """A thread that runs only when it has its turn. Has the face of `threading.Thread`."""

    def __init__(
        self,
        strands: Strands,
        *,
        target: Callable[..., object],
        args: Sequence[object] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self.name, self.over = name, False
        self.ready: Callable[[], bool] = lambda: True
        self.error: BaseException | None = None
        self.turn = _taken_lock()
        self._strands, self._target, self._args = strands, target, args
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        self._strands.all.append(self)
        self._thread.start()

    def _run(self) -> None:
        self._strands.own.strand = self
        self.turn.acquire()
        try:
            self._target(*self._args)
        except BaseException as error:
            self.error = error
        self.over = True
        self._strands.back.release()


class Strands:
    """All strands of a history, and the draw of the next."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.all: list[Strand] = []
        self.own = threading.local()
        self.back = _taken_lock()
        self.turns = 0

    def thread(self, **options: object) -> Strand:
        """Return a strand in the place of a `threading.Thread`."""
        return Strand(self, **options)  # type: ignore[arg-type]

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run, until drawn again and ready. Does nothing in a thread that is none."""
        strand: Strand | None = getattr(self.own, "strand", None)
        if strand is None:
            return
        strand.ready = ready
        self.back.release()
        strand.turn.acquire()

    def run(self) -> None:
        """Give turns until all strands are over. Raise the first error of a strand."""
        while live := [strand for strand in self.all if not strand.over]:
            self.turns += 1
            ready = [strand for strand in live if strand.ready()]
            names = ", ".join(strand.name for strand in live)
            assert ready, f"all wait for each other: {names}"
            assert self.turns < _MOST, f"no end: {names}"
            chosen = self.random.choice(ready)
            chosen.turn.release()
            assert self.back.acquire(timeout=_STUCK_S), f"{chosen.name} waits for a real lock"
            if chosen.error is not None:
                raise chosen.error


class Condition:
    """A `threading.Condition` of strands. A wait with a time limit may end at any turn."""

    def __init__(self, strands: Strands) -> None:
        self._strands = strands
        self._owner: object = None
        self._depth = self._news = 0

    def __enter__(self) -> None:
        me = threading.current_thread()
        self._strands.pause(lambda: self._owner in (None, me))
        self._owner = me
        self._depth += 1

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._strands.pause()

    def notify_all(self) -> None:
        self._news += 1

    def wait(self, timeout: float | None = None) -> None:
        me, depth, before = threading.current_thread(), self._depth, self._news
        assert self._owner is me
        self._owner, self._depth = None, 0
        self._strands.pause(
            lambda: self._owner is None and (timeout is not None or self._news > before)
        )
        self._owner, self._depth = me, depth

    def wait_for(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            self.wait()
