"""Base class `Method`: the interface for rows, options, checks, the trainer and the planner.

A method is a file in the folder and a line in `registry`. Modules of `on_pods`
import TRL and torch; a method names its module by `trainer`.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from workbench.base.errors import ConfigError
from workbench.base.json_values import as_int
from workbench.base.record import Record
from workbench.finetune.data.reading import RowReader
from workbench.finetune.options.evaluation import check_best_metric
from workbench.finetune.options.model.models import language_of
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.techniques.sizes import FP32, HALF, Setting

PACKAGE = "trl"
LEAST = "1.16"
"""Oldest version of TRL whose trainers the methods extend."""
_INSTALL = f"pip install '{PACKAGE}>={LEAST}'"
# Size of the pieces in which TRL computes scores. On a GPU, a single buffer holds every piece.
# Without Triton, the backward pass has 8.25 copies of a piece in FP32.
# https://github.com/huggingface/trl/blob/v1.16.0/trl/kernels/chunked_logprob.py
_PIECE_TOKENS = 4096
_PIECE_WORDS = 32768
_CPU_COPIES = 8.25
# Options of FineTune that describe the loss of answers alone.
_ANSWER_LOSS = (
    "packing",
    "tokens_per_micro_batch",
    "label_smoothing_factor",
    "router_aux_loss_coef",
)


class Method(ABC):
    """What a model learns from a row.

    A subclass without a required member fails when the class is created.
    """

    # Identity.
    name: ClassVar[str]
    """Name of the method in a job: `FineTune(method=…)`."""
    rows: ClassVar[RowReader]
    """Reader of the rows."""
    options: ClassVar[type[Record]]
    """Options of the method alone: `FineTune(method_options=…)`."""
    metrics: ClassVar[Sequence[str]]
    """Metrics of the method, the most important first. The panel draws them."""
    trainer: ClassVar[str]
    """Module in `on_pods` with the trainer; empty for the trainer of the package itself."""

    # What the method needs.
    learning_rates: ClassVar[tuple[float, float] | None] = None
    """Default peak learning rates without and with adapters: TRL's default, and TRL's advice.

    None: the default depends on the model alone.
    """
    scores: ClassVar[bool] = False
    """Whether the model returns a score of a text instead of an answer."""
    uses_rewards: ClassVar[bool] = False
    """Whether functions of the user judge answers: `FineTune(rewards=…)`."""
    has_reference: ClassVar[bool] = False
    """Whether the loss compares the model with a reference: the model before the training."""
    sequences: ClassVar[int] = 1
    """Sequences that the model reads for a row."""
    logits_copies: ClassVar[float] = 0.0
    """Copies of the scores of all words for all tokens at the peak of the loss. 0: TRL computes the
    scores in pieces."""
    recipe: ClassVar[bool] = False
    """Whether a run can be repeated with the files of a recipe, without this project."""

    def __init_subclass__(cls, *, shared: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if shared:
            return
        missing = [name for name in Method.__annotations__ if not hasattr(cls, name)]
        if missing:
            raise TypeError(f"method {cls.__name__} has no {', '.join(sorted(missing))}")

    @property
    def description(self) -> str:
        """Effect of the method, in one sentence."""
        return (type(self).__doc__ or "").partition("\n")[0]

    @property
    def uses_trl(self) -> bool:
        return bool(self.trainer)

    def options_of(self, job: FineTuneOptions) -> Any:
        """Return the method's own options of a job."""
        return self.options.from_dict(job.method_options)

    def needs_reference(self, job: FineTuneOptions) -> bool:
        """Return whether a second, frozen model is in memory during the training.

        With adapters, the base model without its adapters is the reference.
        """
        del job
        return False

    def learns_at_once(self, job: FineTuneOptions) -> tuple[int, int]:
        """Return the largest numbers of tokens of a prompt and of an answer to plan with."""
        source, target = job.planned_lengths
        tokens = job.tokens_per_micro_batch
        if tokens is not None:
            target = min(target, tokens // 2)
            source = tokens - target
        return source, target

    def rows_of_step(self, job: FineTuneOptions, ranks: int) -> int:
        """Return the number of rows of the dataset in an optimizer step."""
        return job.global_batch(ranks)

    # Checks of a job, before anything starts.

    def refuse(self, job: FineTuneOptions) -> None:
        """Refuse options that contradict the method.

        Raises:
            ConfigError: An option has no use or cannot work; the message names an alternative.
        """
        self.options_of(job)
        if job.rewards and not self.uses_rewards:
            raise ConfigError(
                f"rewards judge the answers of method 'grpo', and method is '{self.name}'; "
                "drop rewards, or use method='grpo'"
            )
        if not self.uses_trl:
            return
        self._refuse_answer_loss(job)
        self._refuse_figures(job)
        technique = technique_of(job.technique)
        if technique.apart:
            raise ConfigError(
                f"technique '{job.technique}' lets ranks train apart, and the trainer of method "
                f"'{self.name}' exchanges figures in every step; use 'ddp' or a ZeRO stage"
            )
        if job.sequence_parallel > 1:
            raise ConfigError(
                f"sequence_parallel cuts the rows of method 'sft', and method is '{self.name}'; "
                "drop sequence_parallel"
            )
        if job.tensor_parallel > 1:
            raise ConfigError(
                f"tensor_parallel is for method 'sft', and method is '{self.name}'; drop "
                "tensor_parallel, or use 'zero3' or 'fsdp'"
            )
        if job.device_map:
            raise ConfigError(
                f"device_map spreads one model over GPUs, and method '{self.name}' does not "
                "support the spread; use technique 'fsdp' or 'zero3' without device_map"
            )
        if job.torch_compile:
            raise ConfigError(
                f"torch_compile is for method 'sft', and method is '{self.name}'; "
                "drop torch_compile"
            )
        if job.peft == "qlora" and technique.spreads and "trained" in technique.spreads:
            raise ConfigError(
                f"peft 'qlora' with method '{self.name}' is not offered under technique "
                f"'{job.technique}'; use 'lora', or 'ddp'"
            )
        if job.training.get("use_liger_kernel"):
            raise ConfigError(
                f"training 'use_liger_kernel' is for method 'sft', and method is '{self.name}'; "
                "drop use_liger_kernel"
            )
        targets = job.lora.get("target_modules")
        if not self.logits_copies and isinstance(targets, list | tuple) and "lm_head" in targets:
            raise ConfigError(
                f"lora target_modules names lm_head, and method '{self.name}' computes scores from "
                "the weight of lm_head without its adapter; leave lm_head out"
            )

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        """Refuse a number of ranks with which the batches of the method do not come out even."""
        del job, ranks

    def _refuse_answer_loss(self, job: FineTuneOptions) -> None:
        fields = type(job).model_fields
        for name in _ANSWER_LOSS:
            if getattr(job, name) not in (fields[name].default, 0, None):
                raise ConfigError(
                    f"{name} belongs to the loss of method 'sft', and method is '{self.name}'; "
                    f"drop {name}"
                )
        if job.loss_on != "answer":
            raise ConfigError(
                f"loss_on is {job.loss_on!r}, and method '{self.name}' learns from answers alone; "
                "drop loss_on"
            )

    def _refuse_figures(self, job: FineTuneOptions) -> None:
        if not self.uses_rewards:  # rewards of own functions have the functions' names
            check_best_metric(job, self.metrics)
        if job.metrics and not self.rows.has_answers:
            raise ConfigError(
                f"metrics compare answers with the rows' answers, and method '{self.name}' has "
                "rewards in their place; drop metrics"
            )
        for metric in job.metrics:
            if metric in ("accuracy", "perplexity"):
                raise ConfigError(
                    f"the metric {metric!r} belongs to the loss of method 'sft', and method is "
                    f"'{self.name}'; drop {metric!r}: evaluations report {', '.join(self.metrics)}"
                )
            if self.scores:
                raise ConfigError(
                    f"metrics judge answers, and method '{self.name}' trains a model that scores "
                    f"texts; drop metrics: evaluations report {', '.join(self.metrics)}"
                )
        if self.scores and job.metric_rows is not None:
            raise ConfigError(
                f"metric_rows counts answers, and method '{self.name}' has none; drop metric_rows"
            )

    # Memory, for the planner.

    def setting(self, plain: Setting, job: FineTuneOptions, model: Mapping[str, object]) -> Setting:
        """Return the numbers of a job under the method.

        Args:
            plain: The numbers of a job that learns answers.
            job: The job.
            model: Configuration of the model; empty if unknown.
        """
        if not self.uses_trl:
            return plain
        reference = FP32 if self.needs_reference(job) else 0
        words = as_int(language_of(model).get("vocab_size")) or 0
        return replace(
            plain,
            sequences=float(self.sequences),
            reference_bytes=reference,
            in_pieces=False,
            score_bytes=self._score_bytes(plain, words),
            scored_tokens=None if self.logits_copies else _PIECE_TOKENS,
        )

    def _score_bytes(self, plain: Setting, words: int) -> float | None:
        """Return the bytes of a token's scores at the peak of the loss. None: unknown."""
        if self.scores:
            return 0.0
        if not words:
            return None
        if self.logits_copies:
            # A step under autocast turns the scores into FP32.
            size = HALF if plain.arithmetic in ("bf16", "fp16") else FP32
            return self.logits_copies * size * words
        if plain.gpu:
            size = FP32 if plain.arithmetic == "fp32" else HALF
            return float(size * _PIECE_WORDS)
        return _CPU_COPIES * FP32 * min(words, _PIECE_WORDS)

    # Training, on the ranks.

    def on_pods(self) -> Any:
        """Import the module of the trainer.

        Raises:
            ConfigError: The pod has no TRL, or an older version.
        """
        # TRL would print a warning for each rank: docs/methods.md names the method.
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        try:
            return importlib.import_module(f"workbench.finetune.methods.on_pods.{self.trainer}")
        except ImportError as error:
            raise ConfigError(
                f"method '{self.name}' needs TRL {LEAST} or later, and this pod cannot import its "
                f'trainer ({error}). Ask for it by PodSpec(pip=["trl>={LEAST}"]), or use an image '
                f"with {_INSTALL}"
            ) from error

    def arguments(self, job: FineTuneOptions) -> Mapping[str, Any]:
        """Return the options of TRL's trainer besides the options of every training."""
        return dict(self.options_of(job).to_dict())


class NoOptions(Record):
    """Options of a method that has none."""

    label: ClassVar[str] = "method_options"
