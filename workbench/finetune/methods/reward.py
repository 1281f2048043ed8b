"""Reward models: score texts so that chosen answers score higher than rejected ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from workbench.finetune.methods.method import Method
from workbench.finetune.methods.preference import MethodOptions
from workbench.finetune.methods.rows import ScoredRows


class RewardOptions(MethodOptions):
    """Options of method `reward`."""

    center_rewards_coefficient: Annotated[int | float, Field(gt=0, allow_inf_nan=False)] | None = (
        None
    )
    """Weight of a loss for a mean score near 0. Default None: no loss of the mean."""


class Reward(Method):
    """Reward model: the model scores a text, and chosen answers score higher than rejected ones."""

    name = "reward"
    rows = ScoredRows()
    options = RewardOptions
    metrics = ("accuracy", "margin", "mean_reward")
    trainer = "reward"
    learning_rates = (1e-4, 1e-3)
    scores = True
    sequences = 2
