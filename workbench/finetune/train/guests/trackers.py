"""Calls of trackers. A tracker that fails or is slow costs a training nothing but its reports."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from workbench.agent.rank.notes import note
from workbench.agent.rank.phases import phase

_NOT_STARTED = "did not start, and gets no reports"
_BEGINS = ("on_init_end", "on_train_begin")
_CALLS = {"on_init_end": "start", "on_train_begin": "start", "on_train_end": "end"}
_SLOW_S = 1.0
_LONG_S = 30.0
"""Seconds of a slow start, save or end; some seconds are usual."""
_WAITED_S = 3.0
"""Seconds of slow calls in all from which the user is told."""
_REST = 20.0
"""A report that fails after some time is followed by a pause, this many times as long."""


def guarded_trackers(names: Iterable[str]) -> list[TrackerCalls]:
    """Return the trackers of transformers with these names, with every error of a tracker caught.

    A tracker that cannot be made is left out.
    """
    guarded = []
    for name in names:
        try:
            tracker = INTEGRATION_TO_CALLBACK[name]()
        # The code of others may raise anything, and must not lose the training.
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stderr)
            note(f"the tracker {name} {_NOT_STARTED}: {type(error).__name__}: {error}")
            continue
        # transformers warns of two callbacks of one class.
        made: type[TrackerCalls] = type(f"Guarded{type(tracker).__name__}", (TrackerCalls,), {})
        guarded.append(made(name, tracker))
    return guarded


class TrackerCalls(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Pass every event to a tracker. The user is told of the first failure alone."""

    def __init__(self, name: str, tracker: Any) -> None:
        self._name = name
        self._tracker = tracker
        self._has_failed = False
        self._is_off = False
        self._waited_s = 0.0
        self._rests_until_s = 0.0
        for event in dir(TrainerCallback):
            if event.startswith("on_"):
                setattr(self, event, partial(self._call, event))

    def _call(self, event: str, args: Any, state: Any, control: Any, **options: Any) -> None:
        begin_s = time.monotonic()
        if self._is_off or (event == "on_log" and begin_s < self._rests_until_s):
            return
        if event == "on_train_begin":
            phase(f"starting the tracker {self._name}")
        try:
            getattr(self._tracker, event)(args, state, control, **options)
        # The code of others may raise anything, and must not lose the training.
        except (Exception, SystemExit) as error:
            traceback.print_exc(file=sys.stderr)
            took_s = time.monotonic() - begin_s
            if took_s >= _SLOW_S:
                self._rests_until_s = begin_s + _REST * took_s
            self._failed(event, state.global_step, f"{type(error).__name__}: {error}", took_s)
        else:
            lasted_s = time.monotonic() - begin_s
            if event == "on_log" or lasted_s >= _LONG_S:
                call = _CALLS.get(event, f"report of step {state.global_step}")
                self._timed(lasted_s, call)
        if event == "on_train_begin":
            phase("training")

    def _failed(self, event: str, step: int, words: str, took_s: float) -> None:
        what = f"did not take step {step}"
        if took_s >= _SLOW_S:
            what += f" in {took_s:.1f} s, and gets fewer reports"
        if event in _BEGINS:
            # A tracker without a run of its own would try to start at every report.
            self._is_off = True
            what = _NOT_STARTED
        elif event == "on_train_end":
            what = f"did not finish after step {step}"
        if not self._has_failed:
            note(f"the tracker {self._name} {what}: {words}")
        self._has_failed = True

    def _timed(self, seconds: float, call: str) -> None:
        told_before = self._waited_s >= _WAITED_S
        if seconds >= _SLOW_S:
            self._waited_s += seconds
        if self._waited_s >= _WAITED_S and not told_before:
            note(
                f"the tracker {self._name} is slow: its {call} took "
                f"{seconds:.1f} s. The training waits for every call of a tracker"
            )
