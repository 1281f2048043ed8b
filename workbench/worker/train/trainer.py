"""The Hugging Face Trainer with the parts replaced that would make results depend on technique or number of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PrinterCallback, TrainerCallback

from workbench.base.errors import RunError
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
from workbench.worker.train.best import BestModel
from workbench.worker.train.callbacks import emit_memory
from workbench.worker.train.checkpoints import ResumableTrainer
from workbench.worker.train.evaluation import Evaluator, note
from workbench.worker.train.local_sgd import ParameterAveraging
from workbench.worker.train.measure.meter import StepMeter
from workbench.worker.train.measure.profile import StepProfiler


class FineTuner(ResumableTrainer):
    """Train, evaluate and profile alike under every technique."""

    def __init__(
        self,
        *,
        rows: TokenRows,
        eval_rows: Sequence[Row],
        clock: StepMeter,
        evaluator: Evaluator,
        best: BestModel,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.causal = causal
        self.sharded = isinstance(options.get("model"), FSDPModule)
        super().__init__(train_dataset=rows, eval_dataset=eval_rows, compute_loss_func=self._smoothed_loss, **options)
        # Which labels the Trainer counts: those that have logits before them, as `aligned` pairs them.
        self._loss_shifts_labels = causal
        if self.sharded:
            # accelerate would refuse the shards, or wrap them in DDP; they are where and what they should be.
            self.accelerator.prepare_model = lambda model, **_: model
        self.remove_callback(PrinterCallback)
        self.clock = clock
        self.profiler: StepProfiler | None = None
        self.averaging: ParameterAveraging | None = None
        """What brings the ranks together where they train apart."""
        self.evaluator, self.best = evaluator, best
        self.eval_losses: dict[int, float] = {}
        self.figures: dict[int, dict[str, float]] = {}
        """Of every evaluation of this process, by step."""
        self.write_model: Callable[[], None] = lambda: None
        """Save the model as it is now; every rank calls it."""
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
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
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

    def training_step(self, model: Any, inputs: Mapping[str, torch.Tensor], num_items_in_batch: Any = None) -> Any:
        """Do a forward and a backward pass; stop at the first loss that is no number."""
        profiler = self._profiler_now()
        self.clock.see(inputs, profiled=profiler is not None)
        began = time.perf_counter()
        with profiler.micro_batch_of(getattr(self, "deepspeed", None)) if profiler else nullcontext():
            loss = super().training_step(model, inputs, num_items_in_batch)
        lost = loss.item()  # which waits for the GPU
        self.clock.computed(time.perf_counter() - began)
        if not math.isfinite(lost):
            raise RunError(
                f"loss is {lost} on rank {ranks.rank()} at step {self.state.global_step + 1}; "
                "try a lower learning rate, or precision fp32"
            )
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if "position_ids" in inputs:
            # transformers takes the borders of packed texts from the positions, where no mask is given.
            inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
        profiler = self._profiler_now() if model.training else None
        with profiler.forward() if profiler else nullcontext():
            return super().compute_loss(model, inputs, *args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
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
                note(f"no evaluation had the figure {best.metric}: the model is that of the last step, {last}")
            return last
        if not self.checkpoints.load_best(self):
            note(f"the model is that of the last step, {last}: the checkpoint of the best, {best}, is not there")
            return last
        if self.averaging is not None:
            self.averaging.settle()
        note(f"the model is that of step {best.step}, the best by {best.metric} ({number(best.value)})")
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
        if step in self.eval_losses:  # the Trainer evaluates after its last step, and once more after the epoch
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
            others = {name: value for name, value in figures.items() if name not in (LOSS, "perplexity")}
            emit("eval", step=step, eval_loss=figures[LOSS], perplexity=figures.get("perplexity"), metrics=others)
        if self.args.report_to:
            self._log_evaluation({name if name == LOSS else f"eval_{name}": value for name, value in figures.items()})
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
            batches = eval_batches(self.eval_dataset, size=size, rank=ranks.rank(), world_size=ranks.world_size())
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

    def _smoothed_loss(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        logits, targets = aligned(outputs["logits"], labels, self.causal)
        smoothing = self.args.label_smoothing_factor
        return token_loss({"logits": logits}, targets, num_items_in_batch, smoothing=smoothing)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not self.sharded:  # `fully_shard` has put the shards there, and they cannot be moved
            super()._move_model_to_device(model, device)

    def _profiler_now(self) -> StepProfiler | None:
        """Return the profiler in the last micro-batch of its step; else None."""
        due = self.profiler is not None and self.state.global_step == self.profiler.step - 1
        return self.profiler if due and self.accelerator.sync_gradients else None
