"""Options and checks that methods with a reference model share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from workbench.base.record import Record
from workbench.finetune.options.options import FineTuneOptions

NotNegative = Annotated[int | float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[int | float, Field(ge=0, lt=1)]
REWARDS = (
    "rewards/margins",
    "rewards/accuracies",
    "rewards/chosen",
    "rewards/rejected",
)
"""Metrics of the rewards that a preference gives to chosen and rejected answers."""


class MethodOptions(Record):
    """Options of a method, by TRL's names and with TRL's defaults."""

    label: ClassVar[str] = "method_options"


def second_model(job: FineTuneOptions) -> bool:
    """Return whether the reference needs a second model.

    With adapters, the base without its adapters is the reference.
    """
    return job.peft == "none"
