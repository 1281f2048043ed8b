"""Mixin with all hooks of the workbench, for transformers' `Trainer` and for TRL's trainers.

An optimizer step calls the methods in their order here; "One optimizer step" in docs/inside.md
names the other functions of a step. `points.TechniquePoints` has the hooks of the technique.

Private hooks of transformers. Public hooks are preferred: a private hook stays only if no public
hook does the same. tests/finetune/train/test_trainer_hooks.py fails when the library renames or no
longer calls a hook:

| method | reason |
|---|---|
| `_move_model_to_device` | shards cannot be moved; the public switch is a property of a class |
| `_init_training_state` | sets the step and the epoch that a resumed run continues from |
| `_run_epoch` | makes the library skip the rows of a resumed epoch that are trained already |
| `_prepare_input` | the library waits for the device at each tensor that it copies there |
| `_clip_grad_norm` | techniques clip their shards, and DeepSpeed's engine clips by itself |
| `_get_grad_norm` | the library reads the norm of DeepSpeed's engine, and waits for the device |
| `_maybe_log_save_evaluate` | the library reads each loss at once, and waits for all ranks |
| `_save_checkpoint` | the library's checkpoints differ by technique, and are pickled |

The mixin also sets attributes of a library: the public `accelerator.prepare_model` and
`accelerator.scaler`, and `_total_loss_scalar`, from which transformers computes the mean loss of
the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from os import devnull
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.agent.rank.phases import phase
from workbench.base.errors import RunError
from workbench.base.words import number
from workbench.finetune.model.sequence import SequenceParallel
from workbench.finetune.options.evaluation import LOSS
from workbench.finetune.recipe.order import IGNORED
from workbench.finetune.recipe.standalone import (
    TokenTrainer,
    leave_norms_out_of_decay,
    row_lengths,
    send_in_bf16,
    train_batches,
    use_no_cache,
)
from workbench.finetune.techniques.ddp import DDP
from workbench.finetune.techniques.on_pods.averaging import ParameterAveraging
from workbench.finetune.techniques.on_pods.tensor import TensorParallel
from workbench.finetune.techniques.step_hooks import TechniquePoints
from workbench.finetune.techniques.technique import Technique
from workbench.finetune.train.ahead import Ahead
from workbench.finetune.train.balance import LoadBalance
from workbench.finetune.train.best import BestModel
from workbench.finetune.train.callbacks import LeaveFile, SaveTimer, StopFile, emit_memory
from workbench.finetune.train.checkpoints import Checkpoints
from workbench.finetune.train.evaluation import emit_evaluation
from workbench.finetune.train.guests.trackers import guarded_trackers
from workbench.finetune.train.losses import EndedStep, HostCopy, ReadStep, StepLosses, StepSums
from workbench.finetune.train.measure.meter import StepMeter, Stopwatch
from workbench.finetune.train.measure.pace import Pace
from workbench.finetune.train.measure.profile import StepProfiler
from workbench.finetune.train.optimizers import Make
from workbench.rundir.events import emit

_SAID_EVERY_S = 1.0

# A trainer class of a library follows the mixin in the list of bases.
_Trainer: Any = Trainer if TYPE_CHECKING else object


class Evaluates(Protocol):
    """Evaluation of a trainer's current model."""

    def measure(self, trainer: Any) -> dict[str, float]:
        """Return the figures by name, the same on every rank; every rank must call the method."""


@dataclass(kw_only=True, slots=True)
class TrainerParts:
    """Parts that the workbench adds to a trainer."""

    clock: StepMeter
    stop: StopFile
    leave: LeaveFile | None = None
    """Notice of the pod's end; None for ranks without an agent."""
    timer: SaveTimer | None = None
    """Checkpoints and evaluations by time, which the job left open."""
    best: BestModel
    checkpoints: Checkpoints
    evaluator: Evaluates | None = None
    """Evaluation of the current model; None if the job has no evaluation rows."""
    technique: Technique = field(default_factory=DDP)
    points: TechniquePoints = field(default_factory=TechniquePoints)
    """Hooks of the technique for the job."""
    sends_bf16: bool = False
    """Whether DDP sends gradients in bf16."""
    make_optimizer: Make | None = None
    """Make the optimizer from the model and the names of the decaying weights.

    None: the library or DeepSpeed makes the optimizer.
    """
    causal: bool = False
    """Whether labels are learned from the logits of the token before them."""
    balance: LoadBalance | None = None
    """Load-balancing loss of a mixture of experts; None for other models."""
    sequence: SequenceParallel | None = None
    """Parts of rows for groups of ranks; None where each rank has whole rows."""
    tensor: TensorParallel | None = None
    """Parts of weights for groups of ranks; None where each rank has whole weights."""


class WorkbenchTrainerMixin(_Trainer):  # type: ignore[misc]  # transformers publishes no types
    """Train, evaluate and profile under every technique, with any trainer of transformers."""

    optimizer: Any

    def __init__(self, *, parts: TrainerParts, args: Any, **options: Any) -> None:
        self.clock = parts.clock
        self.stop = parts.stop
        self.leave = parts.leave
        self.timer = parts.timer
        self.best = parts.best
        self.checkpoints = parts.checkpoints
        self.evaluator = parts.evaluator
        self.points = parts.points
        self.causal = parts.causal
        self.balance = parts.balance
        self.sequence = parts.sequence
        self.tensor = parts.tensor
        self.points.tensor = parts.tensor
        shared = parts.sequence or parts.tensor
        self.group = 1 if shared is None else shared.size
        """Number of neighbouring ranks with the same rows."""
        self.technique = parts.technique
        self._sends_bf16 = parts.sends_bf16
        self._make_optimizer = parts.make_optimizer
        self.profiler: StepProfiler | None = None
        self.eval_losses: dict[int, float] = {}
        self.figures: dict[int, dict[str, float]] = {}
        """Figures of every evaluation of the process, by step."""
        self._ahead: Ahead | None = None  # rows of the present epoch
        self.write_model: Callable[[], None] = lambda: None
        """Save the current model; every rank calls the function."""
        self._sums = StepSums()
        self._kept_step = 0  # the last step whose loss was kept
        # Time of this rank's last progress report.
        self._told_s = time.monotonic()
        # Whether progress was reported since the last synchronisation.
        self._counts = False
        self._written: int | None = None  # the step whose model is saved
        self._unmeasured: int | None = None  # the step whose evaluation failed
        # transformers would make the trackers itself, and end the training with their errors.
        reports = args.report_to
        args.report_to = []
        trackers = guarded_trackers(reports)
        super().__init__(args=args, callbacks=trackers, **options)
        args.report_to = reports
        use_no_cache(self.model)
        self.reads_ahead = self.args.device.type == "cuda"
        """Whether a thread reads the rows of the next step."""
        is_joined = self.forward_is_collective or self.group > 1
        self._pace = Pace(self.clock, self.args.device, forward_is_own=not is_joined)
        self._losses = StepLosses(
            device=self.args.device,
            apart=self.points.ranks_train_apart,
            pace=self._pace,
            stop=self.stop,
            leave=self.leave,
            timer=self.timer,
            written=self.checkpoints,
        )

    @property
    def averaging(self) -> ParameterAveraging | None:
        """Averaging of ranks that train apart; None under other techniques."""
        averaging: ParameterAveraging | None = self.points.averaging
        return averaging

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass needs every rank, because ranks hold only parts of the weights."""
        return ranks.world_size() > 1 and "trained" in self.technique.spreads

    @property
    def shifts(self) -> bool:
        """Whether a label belongs to the logits of the token before; parts of rows are shifted."""
        return self.causal and self.sequence is None

    # Before the first step.

    def create_accelerator_and_postprocess(self) -> None:
        """Let the technique wrap the model and, if it has a scaler, scale the loss."""
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.prepare_model = self._wrapped
        scaler = self.points.scaler(self.args.device)
        if scaler is not None:
            accelerator.scaler = scaler

    def _wrapped(self, model: Any, **options: Any) -> Any:
        wrapped = self.points.wrap(self.accelerator, model, **options)
        return send_in_bf16(wrapped) if self._sends_bf16 else wrapped

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if self.points.moves_model:
            super()._move_model_to_device(model, device)

    def use_callbacks(
        self, *, first: Sequence[TrainerCallback], last: Sequence[TrainerCallback]
    ) -> None:
        """Add callbacks before and after the callbacks of the library and its trackers."""
        self.remove_callback(PrinterCallback)
        own = list(self.callback_handler.callbacks)
        for callback in own:
            self.remove_callback(callback)
        for callback in (*first, *own, *last):
            self.add_callback(callback)

    def get_tp_size(self) -> int:
        """Return 1: `get_batch_samples` counts the tokens of every rank, also of shared rows."""
        return 1

    def create_optimizer(self, *args: Any) -> Any:
        if self.optimizer is None and self._make_optimizer is not None:
            decays = set(self.get_decay_parameter_names(self.model))
            self.optimizer = self._make_optimizer(self.model, decays)
        return leave_norms_out_of_decay(self, super().create_optimizer(*args))

    def row_lengths(self) -> torch.Tensor:
        """Return the number of source and of target tokens of every row, rows x 2."""
        return row_lengths(self.train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return train_batches(self, group=self.group)

    def _init_training_state(
        self,
        max_steps: int,
        steps_of_epoch: int,
        *rest: Any,
    ) -> tuple[int, int]:
        begin: tuple[int, int] = super()._init_training_state(max_steps, steps_of_epoch, *rest)
        tree = self.checkpoints.tree
        if tree is None:
            return begin
        self.state.global_step = tree["step"]
        self.state.epoch = tree["epoch"]
        epochs, steps = divmod(self.state.global_step, steps_of_epoch)
        return epochs, steps * self.args.gradient_accumulation_steps

    def _run_epoch(self, **options: Any) -> None:
        if self.checkpoints.tree is not None:
            # With any path the library skips rows that are already trained. The path has no saved
            # random numbers: `Checkpoints` restores them.
            options["resume_from_checkpoint"] = devnull
        super()._run_epoch(**options)

    # One optimizer step.

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of the step, and the number of tokens that all ranks learn from.

        The sum of the tokens over the ranks also carries the loss of the last step, and the time of
        every rank's own work.
        """
        with self._pace.rows():
            batches = self._rows_of(epoch_iterator, num_batches)
        if not batches:
            return batches, None
        labels = [batch["labels"] for batch in batches if "labels" in batch]
        if self.shifts:
            # Only labels with a token before them count, as in `lean_loss.shifted`.
            labels = [each[..., 1:] for each in labels]
        own_tokens = sum(int(each.ne(IGNORED).sum()) for each in labels)
        tokens = self._losses.count(own_tokens)
        if not labels:
            return batches, None
        return batches, tokens.to(device)

    def _rows_of(self, epoch: Iterator[Any], count: int) -> list[Any]:
        """Return the next micro-batches of an epoch; a GPU finds rows that were read before."""
        if not self.reads_ahead:
            return list(islice(epoch, count))
        if self._ahead is None or self._ahead.batches is not epoch:
            if self._ahead is not None:
                self._ahead.close()
            self._ahead = Ahead(epoch, self.args.device)
        return self._ahead.take(count)

    def training_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Run a forward and a backward pass. The loss stays on the device until a later step."""
        self.points.begin_micro_batch(model, last=self.accelerator.sync_gradients)
        profiler = self._profiler_now()
        self.clock.see(self.counted_inputs(inputs), profiled=profiler is not None)
        stopwatch = Stopwatch(self.args.device).begin()
        profiling: AbstractContextManager[None] = nullcontext()
        if profiler is not None:
            profiling = profiler.micro_batch_of(getattr(self, "deepspeed", None))
        with profiling:
            loss = super().training_step(model, inputs, *args, **options)
        self.clock.computed(stopwatch.end())
        return loss

    def counted_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a micro-batch with the mask of the tokens that the model reads."""
        return inputs

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            data = data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if self.balance is not None:
            inputs = self.balance.asking(inputs)
        if not model.training:
            return super().compute_loss(model, inputs, *args, **options)
        profiler = self._profiler_now()
        with self._pace.forward(), profiler.forward() if profiler else nullcontext():
            return super().compute_loss(model, inputs, *args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self.points.clip(self, model)

    def clip_by_library(self, model: Any) -> Any:
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.points.norm(self, model, grad_norm)

    def norm_by_library(self, model: Any, clipped: Any) -> Any:
        return super()._get_grad_norm(model, clipped)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        *rest: Any,
        **options: Any,
    ) -> None:
        """Log the steps whose losses have arrived. Ranks synchronise only when necessary."""
        control = self.control
        averaging = self.averaging
        # The loss of this step stays on the device; earlier losses have arrived meanwhile.
        self._keep(tr_loss, grad_norm, due=control.should_log)
        read = self._losses.read()
        # All ranks have read the same stop request, so all stop after this step.
        stops = self._losses.stop and not control.should_training_stop
        # An evaluation, a checkpoint, the end and a synchronisation need all losses.
        apart = averaging is not None and averaging.apart
        synchronised = averaging is not None and not apart
        ends = control.should_training_stop or control.should_evaluate or control.should_save
        asked = self._losses.save or self._losses.timed
        if stops or synchronised or ends or asked:
            read += self._losses.meet()
            # Ranks that train apart learn only here of a request to stop.
            stops = self._losses.stop and not control.should_training_stop
        if stops or control.should_training_stop:
            self._pace.tell()
        if stops and read:
            read[-1].ended.due = True
        for step in read:
            self._log_step(step)
        if self._losses.written:
            self.checkpoints.finish(self)
        self._losses.written = False
        if stops:
            self.stop.obey(control, step=self.state.global_step)
        # A pod is ending: save once, with all ranks.
        leaves = self._losses.save and self.leave is not None
        if leaves and self.leave is not None:
            self.leave.obey(control, step=self.state.global_step)
        if self._losses.timed and self.timer is not None and not control.should_training_stop:
            self.timer.obey(control)
        self._losses.save = self._losses.timed = False
        self._tell_how_far(apart=apart and not read)
        # The library evaluates and saves, and has nothing left to log.
        control.should_log = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **options)
        if leaves:
            self.checkpoints.finish(self)

    def _keep(self, loss: torch.Tensor, grad_norm: Any, *, due: bool) -> None:
        """Store loss and norm of a finished step, without reading from the device."""
        step = self.state.global_step
        # The Trainer calls once more after each epoch.
        if step == self._kept_step:
            return
        norm = None
        if grad_norm is not None:
            norm = HostCopy(torch.as_tensor(grad_norm))
        ended = EndedStep(
            step=step,
            epoch=self.state.epoch,
            loss=loss.clone(),
            grad_norm=norm,
            due=due,
            balance=None if self.balance is None else self.balance.take(),
        )
        self._losses.keep(ended)
        self._kept_step = step
        # The Trainer adds the loss of the next step.
        loss.zero_()

    def _log_step(self, read: ReadStep) -> None:
        """Log an earlier step, with the state at its end."""
        self._sums.add(read)
        self._total_loss_scalar += read.loss
        if not read.ended.due:
            return
        now = self.state.global_step, self.state.epoch
        self.state.global_step = read.ended.step
        self.state.epoch = read.ended.epoch
        try:
            self.log(self._sums.take(read.ended))
        finally:
            self.state.global_step, self.state.epoch = now
            # Nothing reads the Trainer's list, which would grow with every step.
            self.state.log_history.clear()

    def _tell_how_far(self, *, apart: bool) -> None:
        """Report the progress of a rank that trains apart, once a second.

        Its losses are logged only when ranks synchronise.
        """
        if not apart:
            if self._counts:
                phase("training")
            self._told_s = time.monotonic()
            self._counts = False
        elif ranks.rank() == 0 and time.monotonic() - self._told_s >= _SAID_EVERY_S:
            phase("training", done=self.state.global_step, total=self.state.max_steps)
            self._told_s = time.monotonic()
            self._counts = True

    def _profiler_now(self) -> StepProfiler | None:
        """Return the profiler in the last micro-batch of its step; else None."""
        due = self.profiler is not None and self.state.global_step == self.profiler.step - 1
        return self.profiler if due and self.accelerator.sync_gradients else None

    # Between two steps: checkpoints and evaluations.

    def _save_checkpoint(self, _model: Any, _trial: Any) -> None:
        self.clock.pause()
        phase("checkpoint")
        try:
            self.checkpoints.save(self)
        except RunError as error:
            # Without `save_steps`, no certain checkpoint was asked for, and a failed one must not
            # fail the job.
            if self.checkpoints.every:
                raise
            note(f"no checkpoint of step {self.state.global_step}: {error}")
        phase("training")
        self.clock.resume()

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Emit the loss of all evaluation rows, and the metrics of the job and of the method."""
        if not self.eval_dataset:
            return {}
        step = self.state.global_step
        # The Trainer evaluates after its last step, and once more after the epoch.
        if step in self.eval_losses:
            return {LOSS: self.eval_losses[step]}
        if step == self._unmeasured:
            return {}
        training = self.is_in_train and not self.control.should_training_stop
        self.clock.pause()
        # After the last step save the model first: a later failure then costs only figures.
        if not training:
            self.save_trained()
        phase("evaluating")
        try:
            with self.points.common_weights():
                figures = self._measure()
        except ranks.FailedAlike as error:
            if training:
                raise
            note(f"the last evaluation failed, and the model is saved: {error}")
            self._unmeasured = step
            return {}
        self.eval_losses[step] = figures[LOSS]
        self.figures[step] = figures
        emit_evaluation(step, figures)
        if self.args.report_to:
            logs = {}
            for name, value in figures.items():
                if math.isfinite(value):
                    logs[name if name == LOSS else f"eval_{name}"] = value
            self.log(logs)
        emit_memory(step)
        self._judge(step, figures, training=training)
        if training:
            phase("training")
            self.clock.resume()
        return figures

    def _measure(self) -> dict[str, float]:
        """Return the figures of an evaluation."""
        assert self.evaluator is not None
        return self.evaluator.measure(self)

    def _judge(self, step: int, figures: Mapping[str, float], *, training: bool) -> None:
        """Keep the best model, and stop training when evaluations no longer improve."""
        better = self.best.see(step, figures)
        if not training:
            return
        if better and self.best.wanted and step < self.state.max_steps:
            phase("checkpoint")
            self.checkpoints.save(self)
        why = self.best.exhausted
        if why:
            self.control.should_training_stop = True
            note(f"stopped early after step {step} of {self.state.max_steps}: {why}")

    # After the last step: the model.

    def save_trained(self) -> None:
        if self._written is None:
            self._write_model(self.state.global_step)

    def use_best(self) -> int:
        """Restore the model of the best evaluation, if wanted.

        Return the step of the current model.
        """
        last = int(self.state.global_step)
        best = self.best
        if not best.wanted or best.step in (None, last):
            if best.wanted and best.step is None:
                note(
                    f"no evaluation had the figure {best.metric}: "
                    f"the model is that of the last step, {last}"
                )
            return last
        if not self.checkpoints.load_best(self):
            note(
                f"the model is that of the last step, {last}: the "
                f"checkpoint of the best, {best}, is not there"
            )
            return last
        if self.averaging is not None:
            self.averaging.settle()
        note(
            f"the model is that of step {best.step}, the "
            f"best by {best.metric} ({number(best.value)})"
        )
        assert best.step is not None
        self._write_model(best.step)
        return best.step

    def _write_model(self, step: int) -> None:
        phase("saving")
        with self.points.common_weights():
            self.write_model()
        self._written = step
        if ranks.rank() == 0:
            emit("saved", step=step)


class FineTuner(WorkbenchTrainerMixin, TokenTrainer):
    """Fine-tune on texts, with the loss of a token.

    The recipe of a run card computes the same loss.
    """

    def row_lengths(self) -> torch.Tensor:
        lengths: torch.Tensor = self.train_dataset.lengths
        return lengths

    def token_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        loss = super().token_loss(outputs, labels, num_items_in_batch)
        if self.balance is not None:
            loss = loss + self.balance.part(outputs, self.lean.targets(labels), num_items_in_batch)
        return loss
