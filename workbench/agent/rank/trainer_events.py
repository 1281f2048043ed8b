"""Have the Trainer of a script, and TRL's, tell the notebook how far it is and stop when asked; follow TensorBoard's.

What a script does and prints stays as it is: whatever goes wrong here is told once and forgotten. Standard library
alone, until the script itself has imported the Trainer, or TensorBoard's writer.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LISTENS, _ASKED = (
    "trainer-listens",
    "trainer-asked",
)  # in the rank's folder: for the agent, and by it
_KEY = "workbench/stop-after"
_TIMES = ("_runtime", "_per_second", "_time")
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_OF_TRAINING = frozenset(("train", "training", "step", "batch", "iter", "total"))
_OF_EVAL = frozenset(("eval", "evaluation", "val", "valid", "validation", "test", "dev"))
_SHOWN = {
    "loss": "loss",
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
}
_EVERY_S = 0.25  # the panel draws no more often, and a step may take a millisecond
_PROGRESS_S = (
    1.0  # between two reports of a step that the Trainer does not log: its default is every 500th
)
_told: list[bool] = []
_trainers: list[Any] = []
"""Trainers that have begun: what they write for TensorBoard they have reported already."""


def stop_callback(base: Any, folder: Path) -> type:
    """Make the class of a callback that ends every rank's Trainer after a step when asked; `folder` is the rank's.

    So what follows in the script is done. No signal can do that on several ranks: they would leave at different steps,
    and wait for each other for ever.
    """

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
            if (
                self._last is None
            ):  # else it has been asked already, though its agent may hear of that only now
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


def install(when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Add callbacks to every Trainer that a rank will make, and follow what rank 0 writes for TensorBoard otherwise."""
    when_imported("transformers.trainer", _add)
    if os.environ.get("RANK") == "0":
        for name in _WRITERS:
            when_imported(name, _follow)


def _quiet(action: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(action)
    def quietly(*args: Any, **options: Any) -> None:
        try:
            action(*args, **options)
        except Exception as error:  # the script's own work goes on whatever happens
            if not _told:
                sys.stderr.write(
                    f"the notebook is not told how far the Trainer is: {type(error).__name__}: {error}\n"
                )
            _told.append(True)

    return quietly


@_quiet
def _add(module: Any) -> None:  # noqa: C901
    from workbench.rundir.events import emit, log

    if folder := os.environ.get("WORKBENCH_RANK_DIR"):
        module.DEFAULT_CALLBACKS.append(stop_callback(module.TrainerCallback, Path(folder)))
    if os.environ.get("RANK") != "0":
        return

    class ProgressEvents(module.TrainerCallback):  # type: ignore[misc]  # known at run time alone
        def __init__(self) -> None:
            self._since = (0, time.monotonic())
            self._trained = (0, 0.0)
            self._reported_at = 0.0
            self._reported_step = -1

        @_quiet
        def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            _trainers.append(self)
            self._since = (state.global_step, time.monotonic())
            self._reported_at, self._reported_step = 0.0, -1

        @_quiet
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # A step that is logged is reported by `on_log`, with its loss.
            is_last = control.should_training_stop or state.global_step >= state.max_steps
            if not control.should_log and (
                is_last or time.monotonic() - self._reported_at >= _PROGRESS_S
            ):
                self._report(args, state)

        @_quiet
        def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            # Training may also have been ended by an evaluation, after the step's own turn.
            if self._reported_step != state.global_step:
                self._report(args, state)

        def _report(self, args: Any, state: Any) -> None:
            """Report the step without figures of its own, and the rate of all steps so far."""
            self._reported_at, self._reported_step = time.monotonic(), state.global_step
            steps = self._trained[0] + state.global_step - self._since[0]
            seconds = self._trained[1] + time.monotonic() - self._since[1]
            rate = {"train_samples_per_s": self._rate(args, steps, seconds)} if steps else {}
            epoch = round(state.epoch or 0.0, 4)
            emit("step", step=state.global_step, max_steps=state.max_steps, epoch=epoch, **rate)

        @_quiet
        def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            self._since = (state.global_step, time.monotonic())  # its time is none of the steps'

        @_quiet
        def on_log(self, args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            logs = dict(logs or {})
            if "train_runtime" in logs:
                # The Trainer's own sums count evaluations as training.
                mean = (
                    {"train_samples_per_s": self._rate(args, *self._trained)}
                    if self._trained[0]
                    else {}
                )
                seconds = logs["train_runtime"]
                emit(
                    "end",
                    steps=state.global_step,
                    epochs=logs.get("epoch"),
                    train_loss=logs.get("train_loss"),
                    train_runtime_s=seconds,
                    **mean,
                )
            elif "loss" in logs:
                self._reported_at, self._reported_step = time.monotonic(), state.global_step
                before, at = self._since
                self._since = (state.global_step, time.monotonic())
                steps, seconds = state.global_step - before, self._since[1] - at
                self._trained = (self._trained[0] + steps, self._trained[1] + seconds)
                rates = {
                    "samples_per_s": self._rate(args, steps, seconds),
                    "train_samples_per_s": self._rate(args, *self._trained),
                }
                log(state.global_step, max_steps=state.max_steps, **rates, **logs)
            elif evaluated := [
                name for name in logs if name.startswith("eval_") and not name.endswith(_TIMES)
            ]:
                log(state.global_step, **{name: logs[name] for name in evaluated})

        def _rate(self, args: Any, steps: int, seconds: float) -> float:
            rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            return float(round(rows * steps / max(seconds, 1e-9), 3))

    module.DEFAULT_CALLBACKS.append(ProgressEvents)


def _before(owner: Any, name: str) -> Callable[[Callable[..., None]], None]:
    """Have a method of a class do something else first."""

    def replace(first: Callable[..., None]) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def both(*args: Any, **options: Any) -> Any:
            _quiet(first)(*args, **options)
            return method(*args, **options)

        setattr(owner, name, both)

    return replace


@_quiet
def _follow(module: Any) -> None:
    from workbench.rundir.events import log

    writer, figures = module.SummaryWriter, _Figures(log)
    take = _quiet(figures.take)

    def tell(writer: Any, tag: Any, value: Any, step: Any) -> None:
        if not _trainers:
            place = getattr(writer, "log_dir", "") or getattr(
                writer, "logdir", ""
            )  # torch's word, tensorboardX's
            folder = os.path.basename(str(place))  # noqa: PTH119
            take(f"{folder}/{tag}" if folder in _OF_EVAL else str(tag), value, step)

    @_before(writer, "add_scalar")
    def _one(
        self: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        tell(self, tag, scalar_value, global_step)

    @_before(writer, "add_scalars")
    def _several(
        self: Any, main_tag: Any, tag_scalar_dict: Any, global_step: Any = None, *_: Any, **__: Any
    ) -> None:
        for tag, value in dict(tag_scalar_dict).items():
            tell(self, f"{main_tag}/{tag}", value, global_step)

    atexit.register(_quiet(figures.report), True)


class _Figures:
    """The scalars of one step, reported together once the next step's come."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._log = report
        self._step = 0
        self._figures: dict[str, Any] = {}
        self._reported_at = 0.0

    def take(self, tag: str, value: Any, step: Any) -> None:
        if (name := _figure(tag)) and step is not None:
            if step != self._step:
                self.report(False)
                self._step = int(step)
            self._figures[name] = value

    def report(self, at_end: bool) -> None:
        """Report the step that is over; of many in a short time some, but every evaluation, and the last."""
        figures, self._figures = self._figures, {}
        evaluated = any(name.startswith("eval_") for name in figures)
        if figures and (at_end or evaluated or time.monotonic() - self._reported_at >= _EVERY_S):
            self._reported_at = time.monotonic()
            self._log(self._step, **figures)


def _figure(tag: str) -> str:
    """Return the name by which the notebook shows a scalar; empty for one that TensorBoard alone shows."""
    words = re.findall("[a-z0-9]+", tag.lower())
    name = "_".join(word for word in words if word not in _OF_TRAINING | _OF_EVAL)
    shown = _SHOWN.get(name, "")
    return f"eval_{shown or name}" if name and not _OF_EVAL.isdisjoint(words) else shown
