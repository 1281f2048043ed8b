"""Group relative policy optimization, https://arxiv.org/abs/2402.03300."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.base.errors import ConfigError
from workbench.base.json_values import as_int
from workbench.base.record import Size
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.preference import MethodOptions, NotNegative, Share, second_model
from workbench.finetune.methods.rows import PromptRows
from workbench.finetune.options.evaluation import evaluates
from workbench.finetune.options.model.models import language_of
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.sizes import Setting

Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
Above = Annotated[int | float, Field(gt=0, allow_inf_nan=False)]


class GrpoOptions(MethodOptions):
    """Options of method `grpo`."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Number of answers per prompt, which the method compares."""
    max_completion_length: Size | None = None
    """Largest number of tokens of an answer in training.

    Default None: `max_target_length`, or 128 if that is left open.
    """
    temperature: Above = 1.0
    """Temperature of the sampled answers. Less: the answers are more alike."""
    top_p: Annotated[int | float, Field(gt=0, le=1)] = 1.0
    """Share of the probability from which tokens are sampled."""
    beta: NotNegative = 0.0
    """Weight of the divergence from the reference. Default 0: no reference model is loaded."""
    epsilon: Share = 0.2
    """Clipping of the ratio of the new and the old probability of a token."""
    loss_type: Loss = "dapo"
    """Normalization of the loss over tokens, by TRL's names. `grpo` is the paper's."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Rewards whose standard deviation scales the advantages: of a prompt, of all, or of none."""


class GRPO(Method):
    """Group relative policy optimization: learn from rewards of the model's own answers."""

    name = "grpo"
    rows = PromptRows()
    options = GrpoOptions
    metrics = ("reward", "reward_std", "completions/mean_length", "kl", "entropy")
    trainer = "grpo"
    learning_rates = (1e-6, 1e-5)
    uses_rewards = True

    def needs_reference(self, job: FineTuneOptions) -> bool:
        return self.options_of(job).beta > 0 and second_model(job)

    def learns_at_once(self, job: FineTuneOptions) -> tuple[int, int]:
        source, target = job.planned_lengths
        return source, self.options_of(job).max_completion_length or target

    def rows_of_step(self, job: FineTuneOptions, ranks: int) -> int:
        return job.global_batch(ranks) // int(self.options_of(job).num_generations)

    def setting(self, plain: Setting, job: FineTuneOptions, model: Mapping[str, object]) -> Setting:
        own = super().setting(plain, job, model)
        model = language_of(model)
        layers = as_int(model.get("num_hidden_layers")) or 0
        heads = as_int(model.get("num_attention_heads")) or 1
        width = (as_int(model.get("hidden_size")) or 0) // heads
        kept = width * (as_int(model.get("num_key_value_heads")) or heads)
        # Keys and values of every token, for all answers that a rank writes for a step.
        answers = job.per_device_train_batch_size * job.gradient_accumulation_steps
        tokens = answers * sum(self.learns_at_once(job))
        return replace(own, cache_bytes=float(2 * layers * kept * tokens * own.compute_bytes))

    def arguments(self, job: FineTuneOptions) -> Mapping[str, Any]:
        options = dict(super().arguments(job))
        options["max_completion_length"] = self.learns_at_once(job)[1]
        return options

    def refuse(self, job: FineTuneOptions) -> None:
        super().refuse(job)
        if not job.rewards:
            raise ConfigError(
                "method 'grpo' learns from rewards, and rewards is empty; give rewards=[function], "
                "where function(completions, **columns) returns a number per completion"
            )

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        batch = job.global_batch(ranks)
        generations = self.options_of(job).num_generations
        if batch % generations:
            raise ConfigError(
                f"method 'grpo' writes num_generations = {generations} answers to a prompt, and "
                f"an optimizer step has {batch} answers on {ranks} ranks "
                "(per_device_train_batch_size x gradient_accumulation_steps x ranks); let "
                "num_generations divide the number"
            )
        evaluated = job.per_device_eval_batch_size * ranks
        if evaluates(job) and evaluated % generations:
            raise ConfigError(
                f"method 'grpo' writes num_generations = {generations} answers to a prompt of "
                f"an evaluation, and per_device_eval_batch_size x ranks is {evaluated}; let "
                "num_generations divide the number"
            )
