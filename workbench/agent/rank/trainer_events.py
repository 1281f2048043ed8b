"""Report the progress of a script's Trainer (or TRL's) to the notebook, and stop it on request.

Scalars that a script writes for TensorBoard are reported too. The script itself is unchanged: an
error here is printed once and then ignored. Only the standard library is imported before the script
imports the Trainer or TensorBoard's writer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

# Files in the rank's folder: the rank writes the first for the agent, the agent the second.
_LISTENS = "trainer-listens"
_ASKED = "trainer-asked"
_KEY = "workbench/stop-after"
_TIMES = ("_runtime", "_per_second", "_time")
_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
_OF_TRAINING = frozenset(("train", "training", "step", "batch", "iter", "total"))
_OF_TEST = frozenset(("test", "testing"))
_OF_EVAL = _OF_TEST | {"eval", "evaluation", "val", "valid", "validation", "dev"}
# Letters and digits of every alphabet are parts of a name; ASCII's other characters divide names.
_BETWEEN_WORDS = re.compile(r"[\x00-/:-@\[-`{-\x7f\s]+")
_EVERY_S = 0.25  # the panel draws no more often, and a step may take a millisecond
# Seconds between reports of steps that the Trainer does not log: by default it logs every 500th.
_PROGRESS_S = 1.0
_was_reported: list[bool] = []
_trainers: list[Any] = []
"""Trainers that have begun. A callback reports their TensorBoard values already."""


def stop_callback(base: Any, folder: Path) -> type:
    """Return a callback class that ends the Trainer of every rank after the same step on request.

    The rest of the script still runs. A signal would end the ranks at
    different steps, and ranks would wait for other ranks for ever. `folder` is the rank's folder.
    """

    class StopWhenAsked(base):  # type: ignore[misc]  # known at run time alone
        """End training on all ranks after the same step."""

        def __init__(self) -> None:
            self._last: int | None = None

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            with _signal_on_failure(folder):
                (folder / _LISTENS).touch()

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            if self._last is None:
                with _signal_on_failure(folder):
                    self._last = _last_step(state.global_step, folder)
            if self._last is not None and state.global_step >= self._last:
                control.should_training_stop = True

        def on_train_end(self, *_: Any, **__: Any) -> None:
            # Otherwise the stop was requested already, though the agent may learn so only now.
            if self._last is None:
                _forget(folder)

    return StopWhenAsked


def _last_step(step: int, folder: Path) -> int | None:
    """Return the last step to train once rank 0 has a stop request, else None."""
    from torch import distributed

    first = os.environ.get("RANK", "0") == "0"
    asked = first and (folder / _ASKED).exists()
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return step if asked else None
    store = distributed.distributed_c10d._get_default_store()
    if asked:
        # No rank can end the next step without rank 0, so all ranks see the key by then.
        store.set(_KEY, str(step + 1))
        return int(store.get(_KEY))
    if first or not store.check([_KEY]):
        return None
    return int(store.get(_KEY))


@contextlib.contextmanager
def _signal_on_failure(folder: Path) -> Iterator[None]:
    """Let a failure pass: the script's own work continues, and a signal will stop it."""
    try:
        yield
    except Exception:
        _forget(folder)


def _forget(folder: Path) -> None:
    (folder / _LISTENS).unlink(missing_ok=True)


def changes() -> Mapping[str, Callable[[Any], None]]:
    """Add callbacks to every Trainer of a rank, and report other TensorBoard scalars of rank 0."""
    writers = _WRITERS if os.environ.get("RANK") == "0" else ()
    return {"transformers.trainer": _add, **dict.fromkeys(writers, _follow)}


def _quiet(action: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(action)
    def quietly(*args: Any, **options: Any) -> None:
        try:
            action(*args, **options)
        except Exception as error:  # the script's own work must continue
            if not _was_reported:
                sys.stderr.write(
                    "the notebook is not told how far the Trainer "
                    f"is: {type(error).__name__}: {error}\n"
                )
            _was_reported.append(True)

    return quietly


@_quiet
def _add(module: Any) -> None:  # noqa: C901
    from workbench.rundir.events import emit, log

    folder = os.environ.get("WORKBENCH_RANK_DIR")
    if folder:
        callback = stop_callback(module.TrainerCallback, Path(folder))
        module.DEFAULT_CALLBACKS.append(callback)
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
            self._reported_at = 0.0
            self._reported_step = -1

        @_quiet
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # A step that is logged is reported by `on_log`, with its loss.
            if control.should_log:
                return
            is_last = control.should_training_stop or state.global_step >= state.max_steps
            is_due = time.monotonic() - self._reported_at >= _PROGRESS_S
            if is_last or is_due:
                self._report(args, state)

        @_quiet
        def on_train_end(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
            # Training may also have been ended by an evaluation, after the step's own turn.
            if self._reported_step != state.global_step:
                self._report(args, state)

        def _report(self, args: Any, state: Any) -> None:
            """Report a step without logged figures, and the mean rate of all steps so far."""
            self._reported_at = time.monotonic()
            self._reported_step = state.global_step
            steps_before, seconds_before = self._trained
            since_step, since_s = self._since
            steps = steps_before + state.global_step - since_step
            seconds = seconds_before + time.monotonic() - since_s
            emit(
                "step",
                step=state.global_step,
                max_steps=state.max_steps,
                epoch=round(state.epoch or 0.0, 4),
                **self._mean(args, steps, seconds),
            )

        @_quiet
        def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            # The time of the evaluation does not count for the steps.
            self._since = (state.global_step, time.monotonic())

        @_quiet
        def on_log(
            self,
            args: Any,
            state: Any,
            _control: Any,
            logs: Any = None,
            **_: Any,
        ) -> None:
            logs = dict(logs or {})
            if "train_runtime" in logs:
                self._report_end(args, state, logs)
            elif "loss" in logs:
                self._report_loss(args, state, logs)
            else:
                evaluated = _evaluated(logs)
                if evaluated:
                    log(state.global_step, **evaluated)

        def _report_end(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
            emit(
                "end",
                steps=state.global_step,
                epochs=logs.get("epoch"),
                train_loss=logs.get("train_loss"),
                train_runtime_s=logs["train_runtime"],
                # The Trainer's own sums count evaluations as training.
                **self._mean(args, *self._trained),
            )

        def _report_loss(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
            """Report a logged step with the rates of its interval and of all steps so far."""
            self._reported_at = time.monotonic()
            self._reported_step = state.global_step
            since_step, since_s = self._since
            now = time.monotonic()
            self._since = (state.global_step, now)
            steps = state.global_step - since_step
            seconds = now - since_s
            steps_before, seconds_before = self._trained
            self._trained = (steps_before + steps, seconds_before + seconds)
            rates = {
                "samples_per_s": self._rate(args, steps, seconds),
                "train_samples_per_s": self._rate(args, *self._trained),
            }
            log(state.global_step, max_steps=state.max_steps, **rates, **logs)

        def _mean(self, args: Any, steps: int, seconds: float) -> dict[str, float]:
            """Return the mean rate as the field of an event; empty without a step."""
            if not steps:
                return {}
            return {"train_samples_per_s": self._rate(args, steps, seconds)}

        def _rate(self, args: Any, steps: int, seconds: float) -> float:
            rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            return float(round(rows * steps / max(seconds, 1e-9), 3))

    module.DEFAULT_CALLBACKS.append(ProgressEvents)


def _evaluated(logs: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a Trainer's evaluation, also of a prefix that is not `eval`."""
    prefixes = ["eval_"]
    for name in logs:
        if name.endswith("_runtime"):
            prefixes.append(name.removesuffix("runtime"))
    figures = {}
    for name, value in logs.items():
        if name.startswith(tuple(prefixes)) and not name.endswith(_TIMES):
            figures[name if name.startswith("eval_") else f"eval_{name}"] = value
    return figures


def _call_before(owner: Any, name: str, first: Callable[..., None]) -> None:
    """Call another function before a method of a class."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*args: Any, **options: Any) -> Any:
        _quiet(first)(*args, **options)
        return method(*args, **options)

    setattr(owner, name, both)


@_quiet
def _follow(module: Any) -> None:
    writer = module.SummaryWriter
    figures = _Figures()
    take = _quiet(figures.take)

    def tell(writer: Any, tag: Any, value: Any, step: Any) -> None:
        if not _trainers:
            # torch's writer has `log_dir`, tensorboardX's has `logdir`.
            place = getattr(writer, "log_dir", "") or getattr(writer, "logdir", "")
            folder = os.path.basename(str(place))  # noqa: PTH119
            name = str(tag)
            if folder in _OF_EVAL:
                name = f"{folder}/{tag}"
            take(name, value, step)

    def one(
        self: Any,
        tag: Any,
        scalar_value: Any,
        global_step: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        tell(self, tag, scalar_value, global_step)

    def several(
        self: Any,
        main_tag: Any,
        tag_scalar_dict: Any,
        global_step: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        for tag, value in dict(tag_scalar_dict).items():
            tell(self, f"{main_tag}/{tag}", value, global_step)

    _call_before(writer, "add_scalar", one)
    _call_before(writer, "add_scalars", several)
    atexit.register(_quiet(figures.report), True)


class _Figures:
    """Scalars of a step, reported together at the first scalar of the next step."""

    def __init__(self) -> None:
        self._step = 0
        self._scalars: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        """Names of figures by tag. Two tags never share a name."""
        self._reported_at = 0.0

    def take(self, tag: str, value: Any, step: Any) -> None:
        if step is None or not _figure(tag):
            return
        if step != self._step:
            self.report(False)
            if int(step) < self._step:
                # A training that begins again shows from its first step.
                self._reported_at = 0.0
            self._step = int(step)
        self._scalars[tag] = value

    def report(self, at_end: bool) -> None:
        """Report the finished step: evaluations and the last always, others every 0.25 s."""
        from workbench.rundir.events import log

        scalars = self._scalars
        self._scalars = {}
        if not scalars:
            return
        # A validation takes the short name before a test of the same step.
        for tag in sorted(scalars, key=lambda tag: not _OF_TEST.isdisjoint(_words(tag))):
            if tag not in self._names:
                self._names[tag] = _free_name(tag, self._names.values())
        figures = {self._names[tag]: value for tag, value in scalars.items()}
        evaluated = any(name.startswith("eval_") for name in figures)
        is_due = time.monotonic() - self._reported_at >= _EVERY_S
        if at_end or evaluated or is_due:
            self._reported_at = time.monotonic()
            log(self._step, **figures)


def _words(tag: str) -> list[str]:
    return [word for word in _BETWEEN_WORDS.split(tag.lower()) if word]


def _figure(tag: str) -> str:
    """Return the notebook's name for a scalar, or "" for a scalar that only TensorBoard shows."""
    from workbench.rundir.figures.metrics import scalar_names

    words = _words(tag)
    named = [word for word in words if word not in _OF_TRAINING and word not in _OF_EVAL]
    name = "_".join(named)
    shown = scalar_names().get(name, "")
    if name and not _OF_EVAL.isdisjoint(words):
        return f"eval_{shown or name}"
    return shown


def _free_name(tag: str, taken: Collection[str]) -> str:
    """Return the first name for a scalar that no other scalar has, from short to exact."""
    name = _figure(tag)
    prefix = "eval_" if name.startswith("eval_") else ""
    exact = prefix + tag
    for free in (name, prefix + "_".join(_words(tag)), exact):
        if free not in taken:
            return free
    number = 2
    while f"{exact}-{number}" in taken:
        number += 1
    return f"{exact}-{number}"
