"""End the Trainer of a script after a step when the run is asked to stop, so that what follows in the script is done.

No signal can do that on several ranks: they would leave at different steps, and wait for each other for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LISTENS, _ASKED = "trainer-listens", "trainer-asked"  # in the rank's folder: for the agent, and by it
_KEY = "workbench/stop-after"


def stop_callback(base: Any, folder: Path) -> type:
    """Make the class of a callback that every rank's Trainer gets; `folder` is the rank's."""

    class StopWhenAsked(base):  # type: ignore[misc]  # known at run time alone
        """Have training end, on all ranks after the same step."""

        def __init__(self) -> None:
            self._last: int | None = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            _unless_it_fails(folder, (folder / _LISTENS).touch)

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._last is None:
                self._last = _unless_it_fails(folder, lambda: _last_step(state.global_step, folder))
            if self._last is not None and state.global_step >= self._last:
                control.should_training_stop = True

        def on_train_end(self, *_: Any, **__: Any) -> None:
            _forget(folder)

    return StopWhenAsked


def _last_step(step: int, folder: Path) -> int | None:
    """Return the step after which training is to end, once rank 0 has been asked."""
    from torch import distributed

    first = os.environ.get("RANK", "0") == "0"
    asked = first and (folder / _ASKED).exists()
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return step if asked else None
    store = distributed.distributed_c10d._get_default_store()
    if asked:
        # Nobody can end the next step without rank 0, so all see this by then.
        store.set(_KEY, str(step + 1))
    return int(store.get(_KEY)) if asked or (not first and store.check([_KEY])) else None


def _unless_it_fails(folder: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception:  # the script's own work goes on, and a signal asks it
        _forget(folder)
        return None


def _forget(folder: Path) -> None:
    (folder / _LISTENS).unlink(missing_ok=True)
