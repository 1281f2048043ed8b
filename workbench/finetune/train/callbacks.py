"""Callbacks of the Trainer: events for the notebook, and a stop at a non-finite loss."""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.records import memory
from workbench.agent.ranks.records import LEAVE_ASKED, LEAVE_LISTENS
from workbench.base.clock import now_s
from workbench.base.errors import RunError
from workbench.base.settings import SAVE_EVERY_S, setting_s
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
from workbench.finetune.train.measure.meter import StepMeter
from workbench.rundir.events import Event, EventKind, emit, emit_event

_SAVE_EVERY_S = 600.0
_LEAST_SHARE = 0.05  # of the steps, between two checkpoints by time
_PAUSE_SHARE = 0.1  # most of the time for checkpoints and evaluations by time


def emit_memory(step: int) -> None:
    """Emit the current and the peak memory of the rank."""
    emit("memory", step=step, **memory())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Noted:
    """Measurements of a step when it ends; the loss arrives later."""

    at_s: float
    learning_rate: float | None
    runtime_s: float
    """Seconds of all training steps so far."""
    samples: float
    """Samples of all training steps so far."""
    samples_per_s: float
    """Throughput of all training steps so far."""


class EventCallback(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Turn the Trainer's progress into events."""

    def __init__(
        self,
        clock: StepMeter,
        *,
        samples: float,
        scales_loss: bool = False,
        profiled: Collection[int] = (),
    ) -> None:
        """Set up the callback.

        `samples` is the number of rows of a step (of packed rows: the mean number of texts).
        `profiled` has the steps under a profiler.
        """
        self.profiled = profiled
        self.scales_loss = scales_loss
        self.clock = clock
        self.samples = samples
        self._learning_rate: float | None = None
        self._epoch = 0, 0.0
        # Measurements by step, until the step is logged.
        self._noted: dict[int, _Noted] = {}
        self._logged = 0.0, 0.0  # seconds and samples of the steps that were logged

    def on_step_begin(
        self,
        _args: Any,
        _state: Any,
        _control: Any,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Note the learning rate of the step.

        After the step a DeepSpeed optimizer has the next rate.
        """
        self._learning_rate = float(lr_scheduler.get_last_lr()[0])

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.clock.step(self.samples, profiled=state.global_step in self.profiled)
        self._noted[state.global_step] = _Noted(
            at_s=now_s(),
            learning_rate=self._learning_rate,
            runtime_s=self.clock.runtime_s,
            samples=self.clock.samples,
            samples_per_s=self.clock.samples_per_s,
        )
        if state.global_step == 1:
            emit("first_step")
            emit_memory(1)

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._epoch = state.global_step, self.clock.runtime_s

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Emit the duration of the epoch, and ask for the last evaluation before training ends.

        Trackers close when training ends.
        """
        steps = state.global_step - self._epoch[0]
        total_s = self.clock.runtime_s
        if steps:
            seconds = round(total_s - self._epoch[1], 3)
            emit(
                "epoch",
                epoch=round(state.epoch or 0.0, 4),
                steps=steps,
                seconds=seconds,
                total_s=round(total_s, 3),
            )
        if control.should_training_stop:
            control.should_evaluate = True

    def on_log(
        self,
        _args: Any,
        state: Any,
        _control: Any,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Emit the metrics of the steps since the last log.

        Trackers run later and get the same figures.

        The loss of a step is read at least one step later, so `state` is the state at the end of
        that step.
        """
        if logs and "train_runtime" in logs:
            # The Trainer's own sums count evaluations as training.
            logs["train_runtime"] = round(self.clock.runtime_s, 3)
            logs["train_samples_per_second"] = round(self.clock.samples_per_s, 3)
            logs.pop("train_steps_per_second", None)
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        _finite("loss", logs["loss"], step)
        if self.scales_loss and not math.isfinite(logs.get("grad_norm") or 0.0):
            # The step was skipped, and the next step has half the scale.
            logs.pop("grad_norm")
        _finite("gradient norm", logs.get("grad_norm"), step)
        noted = self._noted[step]
        self._noted = {later: each for later, each in self._noted.items() if later > step}
        logs["samples_per_s"] = rate = round(self._rate_until(noted), 3)
        if noted.learning_rate is not None:
            logs["learning_rate"] = noted.learning_rate
        if ranks.rank() != 0:
            return
        figures = {
            "step": step,
            "max_steps": state.max_steps,
            "epoch": round(state.epoch or 0.0, 4),
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": noted.learning_rate,
            "samples_per_s": rate,
            "train_samples_per_s": round(noted.samples_per_s, 3),
        }
        # The load-balancing loss, and the figures of TRL's trainers.
        for name, value in logs.items():
            if name not in figures and isinstance(value, int | float) and math.isfinite(value):
                figures[name] = value
        if step in self.profiled:
            figures["profiled"] = True
        emit_event(
            Event(
                time_s=noted.at_s,
                rank=0,
                kind=EventKind.STEP,
                data=figures,
            )
        )

    def _rate_until(self, noted: _Noted) -> float:
        """Return the samples a second between the last logged step and the current step."""
        seconds = noted.runtime_s - self._logged[0]
        samples = noted.samples - self._logged[1]
        self._logged = noted.runtime_s, noted.samples
        return samples / seconds if seconds > 0 else 0.0


class StopFile:
    """File whose presence asks the run to end after a step. All ranks end after the same step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stopped = False
        """Whether the run ends by request."""

    def is_there(self) -> bool:
        return self.path.exists()

    def obey(self, control: Any, *, step: int) -> None:
        """End training after this step, with a checkpoint.

        All ranks must call it after the same step.
        """
        self.stopped = control.should_training_stop = control.should_save = True
        if ranks.rank() == 0:
            emit("stopped", step=step)


class LeaveFile:
    """File by which the agent announces the end of the pod: all ranks then write a checkpoint."""

    def __init__(self, rank_folder: Path) -> None:
        self._asked = rank_folder / LEAVE_ASKED
        self._done = False
        (rank_folder / LEAVE_LISTENS).touch()

    def is_there(self) -> bool:
        return not self._done and self._asked.exists()

    def obey(self, control: Any, *, step: int) -> None:
        """Ask for a checkpoint. All ranks must call the method after the same step."""
        control.should_save = True
        self._done = self._asked.exists()
        if ranks.rank() == 0:
            message = f"a pod is ending (SIGTERM): checkpoint after step {step}"
            emit("note", message=message)


class SaveTimer(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Ask for a checkpoint and an evaluation every ten minutes or 5 % of the steps, the later.

    For options that the user left open. Only rank 0 looks at its clock; the request travels with
    the losses, so all ranks obey after the same step.
    """

    def __init__(self, job: FineTune) -> None:
        self._saves = job.save_steps is None
        is_open = job.eval_strategy is None and job.eval_steps is None
        # Sampled answers use random numbers of the training.
        self._evaluates = is_open and not method_of(job.method).uses_rewards
        self._every_s = setting_s(SAVE_EVERY_S, _SAVE_EVERY_S)
        self._since_s = time.monotonic()
        self._steps = 0  # since the last request
        self._least_steps = 1
        self._obeyed_s: float | None = None

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._since_s = time.monotonic()
        self._least_steps = math.ceil(_LEAST_SHARE * state.max_steps)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Measure the pause since the last step; a long pause makes the next one rarer."""
        if self._obeyed_s is None:
            return
        self._since_s = time.monotonic()
        pause_s = self._since_s - self._obeyed_s
        self._every_s = max(self._every_s, pause_s / _PAUSE_SHARE)
        self._obeyed_s = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._steps += 1

    def is_there(self) -> bool:
        if ranks.rank() != 0 or not (self._saves or self._evaluates):
            return False
        waited_s = time.monotonic() - self._since_s
        return self._steps >= self._least_steps and waited_s >= self._every_s

    def obey(self, control: Any) -> None:
        """Ask for both after this step. All ranks must call the method after the same step."""
        control.should_save = control.should_save or self._saves
        control.should_evaluate = control.should_evaluate or self._evaluates
        self._steps = 0
        self._obeyed_s = time.monotonic()


def _finite(what: str, value: float | None, step: int) -> None:
    if value is not None and not math.isfinite(value):
        raise RunError(
            f"{what} is {value} at step {step}; try a lower learning rate, or precision fp32"
        )
