"""Odds ratio preference optimization, https://arxiv.org/abs/2403.07691."""

from __future__ import annotations

from workbench.finetune.methods.method import Method
from workbench.finetune.methods.preference import REWARDS, MethodOptions, NotNegative
from workbench.finetune.methods.rows import PairRows


class OrpoOptions(MethodOptions):
    """Options of method `orpo`."""

    beta: NotNegative = 0.1
    """Weight of the odds ratio beside the loss of the chosen answer; λ in the paper."""


class ORPO(Method):
    """Odds ratio preference optimization: learn the chosen answer, and avoid the rejected one.

    Without a reference model.
    """

    name = "orpo"
    rows = PairRows()
    options = OrpoOptions
    metrics = (*REWARDS, "nll_loss", "log_odds_ratio")
    trainer = "orpo"
    learning_rates = (1e-6, 1e-5)
    sequences = 2
    # Counted on CPUs with TRL's loss: the scores, a log-softmax of half, and gradients.
    logits_copies = 4.5
