"""Direct preference optimization, https://arxiv.org/abs/2305.18290."""

from __future__ import annotations

from typing import Literal

from workbench.base.errors import ConfigError
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.preference import (
    REWARDS,
    MethodOptions,
    NotNegative,
    Share,
    second_model,
)
from workbench.finetune.methods.rows import PairRows
from workbench.finetune.options.options import FineTuneOptions

Loss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]


class DpoOptions(MethodOptions):
    """Options of method `dpo`."""

    beta: NotNegative = 0.1
    """Strength with which the model is held near its reference. More: nearer."""
    loss_type: Loss = "sigmoid"
    """Loss of a pair, by TRL's names. `sigmoid` is the loss of the paper."""
    label_smoothing: Share = 0.0
    """Share of the pairs that are assumed to be labelled the wrong way round."""


class DPO(Method):
    """Direct preference optimization: the model learns to prefer the chosen answer of a pair."""

    name = "dpo"
    rows = PairRows()
    options = DpoOptions
    metrics = REWARDS
    trainer = "dpo"
    learning_rates = (1e-6, 1e-5)
    has_reference = True
    sequences = 2

    def needs_reference(self, job: FineTuneOptions) -> bool:
        return second_model(job)

    def refuse(self, job: FineTuneOptions) -> None:
        super().refuse(job)
        options = self.options_of(job)
        if options.loss_type == "exo_pair" and not options.label_smoothing:
            raise ConfigError(
                "method_options: loss_type 'exo_pair' needs a label_smoothing above 0; the paper "
                "recommends 1e-3"
            )
