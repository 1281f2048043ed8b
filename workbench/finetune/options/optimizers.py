"""Option records of the optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from workbench.base.record import Positive, Record
from workbench.finetune.options.choices import MuonRate, Optimizer

_Share = Annotated[int | float, Field(ge=0, lt=1)]


class LionOptions(Record):
    """Options of optimizer `lion`."""

    label: ClassVar[str] = "optimizer_options"

    beta1: _Share = 0.9
    """Weight of the state in the update, against the gradient's weight of 1 - β1."""
    beta2: _Share = 0.99
    """Decay of the state, a mean of gradients."""


class MuonOptions(Record):
    """Options of optimizer `muon`."""

    label: ClassVar[str] = "optimizer_options"

    momentum: _Share = 0.95
    """Decay of the mean of gradients (Nesterov momentum)."""
    adjust_lr_fn: MuonRate = "match_rms_adamw"
    """One of `MuonRate`: the scale of the learning rate for a matrix."""
    adam_learning_rate: Positive | None = None
    """Peak learning rate of the weights that AdamW updates. Default None: `learning_rate`."""


OPTIMIZER_OPTIONS: Mapping[Optimizer, type[Record]] = {
    "lion": LionOptions,
    "muon": MuonOptions,
}
"""Records of the optimizers that have options of their own."""
