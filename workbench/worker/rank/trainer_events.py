"""Have the Trainer of a script, and those that are made of it such as TRL's, tell the notebook how far it is.

What a script does and prints stays as it is: whatever goes wrong here is told once and forgotten. Standard library
alone, until the script itself has imported the Trainer.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["install"]

_OF_LOG = {"train_samples_per_second": "train_samples_per_s", "train_runtime": "train_runtime_s"}
_TIMES = ("_runtime", "_per_second", "_time")


def install(when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Add a callback to every Trainer that rank 0 will make."""
    if os.environ.get("RANK") == "0":
        when_imported("transformers.trainer", _add)


def _quiet(action: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(action)
    def quietly(*args: Any, **options: Any) -> None:
        try:
            action(*args, **options)
        except Exception as error:  # the script's own work goes on whatever happens
            if not _told:
                sys.stderr.write(f"the notebook is not told how far the Trainer is: {type(error).__name__}: {error}\n")
            _told.append(True)

    return quietly


_told: list[bool] = []


@_quiet
def _add(module: Any) -> None:
    from workbench.rundir.events import emit, log

    class ProgressEvents(module.TrainerCallback):  # type: ignore[misc]  # known at run time alone
        """Emit what the Trainer logs."""

        def __init__(self) -> None:
            self._since = (0, time.monotonic())

        @_quiet
        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._since = (state.global_step, time.monotonic())

        @_quiet
        def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._since = (state.global_step, time.monotonic())  # its time is none of the steps'

        @_quiet
        def on_log(self, args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            logs = dict(logs or {})
            if "train_runtime" in logs:
                ends = {name: logs[key] for key, name in _OF_LOG.items() if key in logs}
                emit(
                    "end", steps=state.global_step, epochs=logs.get("epoch"), train_loss=logs.get("train_loss"), **ends
                )
            elif "loss" in logs:
                before, at = self._since
                self._since = (state.global_step, time.monotonic())
                rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
                rate = rows * (state.global_step - before) / max(self._since[1] - at, 1e-9)
                log(state.global_step, max_steps=state.max_steps, samples_per_s=round(rate, 3), **logs)
            elif evaluated := [name for name in logs if name.startswith("eval_") and not name.endswith(_TIMES)]:
                log(state.global_step, **{name: logs[name] for name in evaluated})

    module.DEFAULT_CALLBACKS.append(ProgressEvents)
