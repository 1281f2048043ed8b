"""TRL's trainer of `orpo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trl.experimental.orpo import ORPOConfig as Arguments
from trl.experimental.orpo import ORPOTrainer as Base

from workbench.finetune.data.rows import Example
from workbench.finetune.methods.on_pods.hooks import Figures, TrlHooks
from workbench.finetune.methods.on_pods.rows import TokenRow, pair
from workbench.finetune.recipe.order import IGNORED

__all__ = ["UNCUT", "Arguments", "Base", "Hooks", "token_rows"]

_LONGEST = 1 << 20
UNCUT = {"max_length": _LONGEST}
"""Arguments by which TRL cuts no row: rows are cut as in other training."""


class Hooks(TrlHooks):
    """Rows as tokens, and the figures kept by the trainer."""

    def tokenize_row(self, row: Any, *_: Any) -> Any:
        """Return a row that is tokens already."""
        return row

    def counted_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the masks of both answers as one."""
        names = ("chosen_attention_mask", "rejected_attention_mask")
        return {"attention_mask": torch.cat([inputs[name].flatten() for name in names])}

    def _exchange(self, mode: str, figures: Figures) -> Figures:
        held: Figures = self._stored_metrics[mode]  # type: ignore[attr-defined]
        self._stored_metrics[mode] = figures  # type: ignore[attr-defined]
        return held


def token_rows(encoder: Any, examples: Sequence[Example], first: int) -> list[TokenRow]:
    """Return the examples as tokens. `first` is the number of the first row in errors."""
    rows: list[TokenRow] = []
    for number, example in enumerate(examples, first):
        prompt, chosen, rejected = pair(encoder, example, number)
        row: dict[str, Any] = {
            "prompt_input_ids": prompt,
            "prompt_attention_mask": [1] * len(prompt),
        }
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            ids = prompt + answer
            row[f"{name}_input_ids"] = ids
            row[f"{name}_attention_mask"] = [1] * len(ids)
            row[f"{name}_labels"] = [IGNORED] * len(prompt) + answer
        rows.append(row)
    return rows
