"""Kahneman-Tversky optimization, https://arxiv.org/abs/2402.01306."""

from __future__ import annotations

from typing import Literal

from workbench.base.errors import ConfigError
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.preference import (
    MethodOptions,
    NotNegative,
    second_model,
)
from workbench.finetune.methods.rows import LabelledRows
from workbench.finetune.options.options import FineTuneOptions

Loss = Literal["kto", "apo_zero_unpaired"]


class KtoOptions(MethodOptions):
    """Options of method `kto`."""

    beta: NotNegative = 0.1
    """Strength with which the model is held near its reference. More: nearer."""
    loss_type: Loss = "kto"
    """Loss of a row, by TRL's names. `kto` is the loss of the paper."""
    desirable_weight: NotNegative = 1.0
    """Weight of the loss of good answers, against unequal numbers of good and bad answers."""
    undesirable_weight: NotNegative = 1.0
    """Weight of the loss of bad answers."""


class KTO(Method):
    """Kahneman-Tversky optimization: learn from single answers that are marked good or bad."""

    name = "kto"
    rows = LabelledRows()
    options = KtoOptions
    metrics = ("rewards/margins", "rewards/chosen", "rewards/rejected", "kl")
    trainer = "kto"
    learning_rates = (1e-6, 1e-5)
    has_reference = True

    def needs_reference(self, job: FineTuneOptions) -> bool:
        return second_model(job)

    def refuse(self, job: FineTuneOptions) -> None:
        super().refuse(job)
        estimates = self.options_of(job).loss_type == "kto"
        if estimates and job.per_device_train_batch_size < 2:
            raise ConfigError(
                "method 'kto' estimates a divergence from the other rows of a micro-batch, and "
                "per_device_train_batch_size is 1; use 2 or more, or "
                "method_options={'loss_type': 'apo_zero_unpaired'}"
            )
