"""The Hugging Face Trainer with the parts replaced that would make results depend on technique or number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PrinterCallback, TrainerCallback

from workbench.base.words import number
from workbench.jobs.adapters import LocalSgd
from workbench.jobs.evaluation import LOSS
from workbench.rundir.events import emit
from workbench.worker.data.rows import Row, aligned
from workbench.worker.data.tokens import TokenRows
from workbench.worker.model import sharding
from workbench.worker.order import IGNORED, eval_batches
from workbench.worker.rank import collectives as ranks
from workbench.worker.rank.phases import counted, phase
from workbench.worker.standalone import token_loss
from workbench.worker.train.balance import LoadBalance
from workbench.worker.train.best import BestModel
from workbench.worker.train.callbacks import StopFile, emit_memory
from workbench.worker.train.checkpoints import ResumableTrainer
from workbench.worker.train.evaluation import Evaluator, note
from workbench.worker.train.local_sgd import ParameterAveraging
from workbench.worker.train.losses import EndedStep, HostCopy, ReadStep, StepLosses
from workbench.worker.train.measure.meter import StepMeter, Stopwatch
from workbench.worker.train.measure.profile import StepProfiler

_SAID_EVERY_S = 1.0


class FineTuner(ResumableTrainer):
    """Train, evaluate and profile alike under every technique."""

    _globalstep_last_logged: int
    """The Trainer's own."""

    def __init__(
        self,
        *,
        rows: TokenRows,
        eval_rows: Sequence[Row],
        clock: StepMeter,
        evaluator: Evaluator,
        best: BestModel,
        stop: StopFile,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.causal = causal
        self.sharded = isinstance(options.get("model"), FSDPModule)
        super().__init__(
            train_dataset=rows,
            eval_dataset=eval_rows,
            compute_loss_func=self._smoothed_loss,
            **options,
        )
        if self.sharded:
            # accelerate would refuse the shards, or wrap them in DDP; they are where and what they should be.
            self.accelerator.prepare_model = lambda model, **_: model
        self.remove_callback(PrinterCallback)
        self.clock = clock
        self.profiler: StepProfiler | None = None
        self.balance: LoadBalance | None = None
        """The load-balancing loss of a mixture of experts; None for other models."""
        self.averaging: ParameterAveraging | None = None
        """What brings the ranks together where they train apart."""
        self.evaluator, self.best, self.stop = evaluator, best, stop
        self.eval_losses: dict[int, float] = {}
        self.figures: dict[int, dict[str, float]] = {}
        """Of every evaluation of this process, by step."""
        self.write_model: Callable[[], None] = lambda: None
        """Save the model as it is now; every rank calls it."""
        self._losses = StepLosses(device=self.args.device, apart=False, asked_to_stop=stop.is_there)
        self._kept_step = 0  # the last one whose loss was taken in
        self._loss_sum = 0.0  # of the steps that were read, and not logged
        self._balance_sum = self._balanced = (
            0.0  # the load-balancing loss times the tokens, and the tokens, of those
        )
        self._told_s = time.monotonic()  # when this rank last said how far it is
        self._counts = False  # whether it has said so between two synchronisations
        self._written: int | None = None
        self._unmeasured: int | None = None  # the step whose evaluation failed

    def row_lengths(self) -> torch.Tensor:
        lengths: torch.Tensor = self.train_dataset.lengths
        return lengths

    def tell_first(self, callback: TrainerCallback) -> None:
        """Add a callback that is called before all others, those of trackers among them."""
        self.callback_handler.callbacks.insert(0, callback)

    def train_apart(self, options: LocalSgd) -> None:
        """Have each rank train by itself, and average their weights; to be called after callbacks that take time."""
        # Without DDP around the model, and else as accelerate prepares it.
        self.accelerator.prepare_model = partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )
        self._losses = StepLosses(
            device=self.args.device, apart=True, asked_to_stop=self.stop.is_there
        )
        self.averaging = ParameterAveraging(self.model, options)
        self.tell_first(self.averaging)

    def _averaged(self) -> AbstractContextManager[None]:
        return self.averaging.averaged() if self.averaging is not None else nullcontext()

    @property
    def forward_is_collective(self) -> bool:
        """Whether a forward pass needs every rank, because each holds but a part of the weights."""
        engine = getattr(self, "deepspeed", None)
        zero3 = engine is not None and int(engine.zero_optimization_stage()) == 3
        return ranks.world_size() > 1 and (self.sharded or zero3)

    def training_step(
        self, model: Any, inputs: Mapping[str, torch.Tensor], num_items_in_batch: Any = None
    ) -> Any:
        """Do a forward and a backward pass. The loss stays on the device: `_maybe_log_save_evaluate` has it read."""
        profiler = self._profiler_now()
        self.clock.see(inputs, profiled=profiler is not None)
        stopwatch = Stopwatch(self.args.device).begin()
        with (
            profiler.micro_batch_of(getattr(self, "deepspeed", None)) if profiler else nullcontext()
        ):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.clock.computed(stopwatch.end())
        return loss

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[Mapping[str, torch.Tensor]], device: Any
    ) -> Any:
        """Count the tokens of the step that begins; the same sum over the ranks carries the last step's loss."""
        if not batch_samples:
            return None
        labels = [batch["labels"] for batch in batch_samples]
        if self.causal:
            # Labels that have logits before them, as `aligned` pairs them.
            labels = [each[..., 1:] for each in labels]
        return self._losses.count(sum(int(each.ne(IGNORED).sum()) for each in labels)).to(device)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.is_deepspeed_enabled:
            # Here and in accelerate, the Trainer would wait for the norm that the engine has left on its device.
            return self.deepspeed.get_global_grad_norm()
        return super()._get_grad_norm(model, grad_norm)

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, *rest: Any, **options: Any
    ) -> None:
        """Log the steps whose losses have come; let ranks meet only where they have to."""
        control = self.control
        self._keep(tr_loss, grad_norm, due=control.should_log)
        read = self._losses.read()
        # All ranks have read the same wish to stop, so all stop after this step.
        stops = self._losses.stop and not control.should_training_stop
        apart = self.averaging is not None and self.averaging.apart
        synchronised = self.averaging is not None and not apart
        ends = control.should_training_stop or control.should_evaluate or control.should_save
        if stops or synchronised or ends:
            read += self._losses.meet()
            # Ranks that train apart learn only here that one of them was asked.
            stops = self._losses.stop and not control.should_training_stop
        if stops and read:
            read[-1].ended.due = True
        for step in read:
            self._log_step(step)
        if stops:
            self.stop.obey(control, step=self.state.global_step)
        self._say_how_far(apart=apart and not read)
        control.should_log = False  # it is done
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *rest, **options)

    def _keep(self, loss: torch.Tensor, grad_norm: Any, *, due: bool) -> None:
        step = self.state.global_step
        if step == self._kept_step:  # the Trainer asks once more after each epoch
            return
        norm = HostCopy(torch.as_tensor(grad_norm)) if grad_norm is not None else None
        balance = self.balance.take() if self.balance is not None else None
        self._losses.keep(
            EndedStep(
                step=step,
                epoch=self.state.epoch,
                loss=loss.clone(),
                grad_norm=norm,
                due=due,
                balance=balance,
            )
        )
        self._kept_step = step
        loss.zero_()  # the Trainer adds the next step's to it

    def _log_step(self, read: ReadStep) -> None:
        """Log a step that ended before now, with the state that was then."""
        ended = read.ended
        self._loss_sum += read.loss
        self._total_loss_scalar += read.loss
        self._balance_sum += read.balance
        self._balanced += read.balanced
        if not ended.due:
            return
        logs = {"loss": self._loss_sum / (ended.step - self._globalstep_last_logged)}
        if self._balanced:
            logs["aux_loss"] = self._balance_sum / self._balanced
        self._balance_sum = self._balanced = 0.0
        if ended.grad_norm is not None:
            (logs["grad_norm"],) = ended.grad_norm.read()
        self._loss_sum, self._globalstep_last_logged = 0.0, ended.step
        now = self.state.global_step, self.state.epoch
        self.state.global_step, self.state.epoch = ended.step, ended.epoch
        try:
            self.log(logs)
        finally:
            self.state.global_step, self.state.epoch = now

    def _say_how_far(self, *, apart: bool) -> None:
        """Say once a second how far a rank is that trains apart: its losses are logged when ranks meet."""
        if not apart:
            if self._counts:
                phase("training")
            self._told_s, self._counts = time.monotonic(), False
        elif ranks.rank() == 0 and time.monotonic() - self._told_s >= _SAID_EVERY_S:
            phase("training", done=self.state.global_step, total=self.state.max_steps)
            self._told_s, self._counts = time.monotonic(), True

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if "position_ids" in inputs:
            # transformers takes the borders of packed texts from the positions, where no mask is given.
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        if self.balance is not None:
            inputs = self.balance.asking(inputs)
        profiler = self._profiler_now() if model.training else None
        with profiler.forward() if profiler else nullcontext():
            return super().compute_loss(model, inputs, *args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.is_deepspeed_enabled:
            return None  # the engine clips in its own step
        if self.sharded:
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.unscale_(self.optimizer.optimizer)
            return sharding.clip_gradients(self.model, self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def save_trained(self) -> None:
        if self._written is None:
            self._write_model(self.state.global_step)

    def use_best(self) -> int:
        """Go back to the model of the best evaluation where that is wanted; return the step of the model there is."""
        last, best = int(self.state.global_step), self.best
        if not best.wanted or best.step in (None, last):
            if best.wanted and best.step is None:
                note(
                    f"no evaluation had the figure {best.metric}: the model is that of the last step, {last}"
                )
            return last
        if not self.checkpoints.load_best(self):
            note(
                f"the model is that of the last step, {last}: the checkpoint of the best, {best}, is not there"
            )
            return last
        if self.averaging is not None:
            self.averaging.settle()
        note(
            f"the model is that of step {best.step}, the best by {best.metric} ({number(best.value)})"
        )
        assert best.step is not None
        self._write_model(best.step)
        return best.step

    def _write_model(self, step: int) -> None:
        phase("saving")
        with self._averaged():
            self.write_model()
        self._written = step
        if ranks.rank() == 0:
            emit("saved", step=step)

    def evaluate(self, *_args: Any, **_options: Any) -> dict[str, float]:
        """Compute the mean loss of a token over all evaluation rows and the job's metrics, and tell them."""
        if not self.eval_dataset:
            return {}
        step = self.state.global_step
        if (
            step in self.eval_losses
        ):  # the Trainer evaluates after its last step, and once more after the epoch
            return {"eval_loss": self.eval_losses[step]}
        if step == self._unmeasured:
            return {}
        training = self.is_in_train and not self.control.should_training_stop
        self.clock.pause()
        if not training:
            self.save_trained()  # what fails from here on costs figures, and not the model
        phase("evaluating")
        try:
            with self._averaged():
                figures = self.evaluator.figures(self, *self._eval_loss())
        except ranks.FailedAlike as error:
            if training:
                raise
            note(f"the last evaluation failed, and the model is saved: {error}")
            self._unmeasured = step
            return {}
        self.eval_losses[step], self.figures[step] = figures[LOSS], figures
        if ranks.rank() == 0:
            others = {
                name: value for name, value in figures.items() if name not in (LOSS, "perplexity")
            }
            emit(
                "eval",
                step=step,
                eval_loss=figures[LOSS],
                perplexity=figures.get("perplexity"),
                metrics=others,
            )
        if self.args.report_to:
            self._log_evaluation(
                {name if name == LOSS else f"eval_{name}": value for name, value in figures.items()}
            )
        emit_memory(step)
        self._judge(step, figures, training=training)
        if training:
            phase("training")
            self.clock.resume()
        return figures

    def _log_evaluation(self, figures: dict[str, float]) -> None:
        try:
            self.log(figures)
        except Exception as error:  # a tracker's code, on rank 0 alone
            if not self.control.should_training_stop:
                raise
            note(f"the tracker did not take the last evaluation: {type(error).__name__}: {error}")

    def _judge(self, step: int, figures: Mapping[str, float], *, training: bool) -> None:
        better = self.best.see(step, figures)
        if not training:
            return
        if better and self.best.wanted and step < self.state.max_steps:
            phase("checkpoint")
            self.checkpoints.save(self)
        if why := self.best.exhausted:
            self.control.should_training_stop = True
            note(f"stopped early after step {step} of {self.state.max_steps}: {why}")

    def _eval_loss(self) -> tuple[float, float]:
        """Return the mean loss of a token, and the share of tokens that the model gets right where that is counted."""
        # DDP's own forward pass sends the model's buffers around.
        wrapped = self.model_wrapped
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        model.eval()
        with ranks.alike(collective=self.forward_is_collective):
            sums = self._eval_sums(model)
        model.train()
        total, count, right = ranks.sums(sums)
        return total / count, right / count

    def _eval_sums(self, model: Any) -> list[float]:
        total, tokens, right = 0.0, 0, 0
        size = self.args.per_device_eval_batch_size
        with torch.no_grad():
            batches = eval_batches(
                self.eval_dataset, size=size, rank=ranks.rank(), world_size=ranks.world_size()
            )
            count = -(-len(self.eval_dataset) // (size * ranks.world_size()))
            for rows, counts in counted(batches, count, "evaluating"):
                batch = self._prepare_inputs(self.data_collator(rows))
                labels = batch.pop("labels")
                outputs = model(**batch)
                logits, targets = aligned(outputs["logits"], labels, self.causal)
                loss = token_loss({"logits": logits}, targets)
                if not counts:
                    continue
                total += float(loss.item())
                tokens += int((targets != IGNORED).sum().item())
                if self.evaluator.counts_right:
                    right += int((logits.argmax(-1) == targets).sum().item())
        return [total, float(tokens), float(right)]

    def _smoothed_loss(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> Any:
        logits, targets = aligned(outputs["logits"], labels, self.causal)
        smoothing = self.args.label_smoothing_factor
        loss = token_loss({"logits": logits}, targets, num_items_in_batch, smoothing=smoothing)
        return (
            loss
            if self.balance is None
            else loss + self.balance.part(outputs, targets, num_items_in_batch)
        )

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not self.sharded:  # `fully_shard` has put the shards there, and they cannot be moved
            super()._move_model_to_device(model, device)

    def _profiler_now(self) -> StepProfiler | None:
        """Return the profiler in the last micro-batch of its step; else None."""
        due = self.profiler is not None and self.state.global_step == self.profiler.step - 1
        return self.profiler if due and self.accelerator.sync_gradients else None
