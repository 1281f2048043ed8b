"""TRL's trainer of `dpo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl import DPOConfig as Arguments
from trl import DPOTrainer as Base

from workbench.finetune.data.rows import Example
from workbench.finetune.methods.on_pods.hooks import ReferenceHooks as Hooks
from workbench.finetune.methods.on_pods.rows import TokenRow, pair

__all__ = ["UNCUT", "Arguments", "Base", "Hooks", "token_rows"]

UNCUT = {"max_length": None}
"""Arguments by which TRL cuts no row: rows are cut as in other training."""


def token_rows(encoder: Any, examples: Sequence[Example], first: int) -> list[TokenRow]:
    """Return the examples as tokens. `first` is the number of the first row in errors."""
    rows: list[TokenRow] = []
    for number, example in enumerate(examples, first):
        prompt, chosen, rejected = pair(encoder, example, number)
        rows.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return rows
