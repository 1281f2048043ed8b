"""Load-balancing loss of a mixture of experts.

Without the loss some experts receive ever more tokens, and others none. transformers adds the loss
if a model receives labels. Here the Trainer removes the labels from the batch, so this module adds
the loss. Every micro-batch counts in proportion to its learned tokens, for any number of ranks and
any accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench.base.errors import RunError
from workbench.finetune.recipe.order import IGNORED


class LoadBalance:
    """Ask a model for its load-balancing loss, and sum the weighted loss over a step."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        # Loss times tokens, and tokens, on the model's device.
        self._sums: torch.Tensor | None = None

    def asking(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch that asks the model for the loss, unless the weight of the loss is 0."""
        return {**inputs, "output_router_logits": self.coefficient > 0}

    def part(self, outputs: Any, targets: torch.Tensor, num_items_in_batch: Any) -> Any:
        """Return the share of a micro-batch in the loss of the global batch."""
        if not self.coefficient:
            return 0.0
        loss = outputs.get("aux_loss")
        if loss is None:
            raise RunError(
                "the model returns no load-balancing loss; give "
                "router_aux_loss_coef=0 to train without it"
            )
        tokens = (targets != IGNORED).sum()
        weighed = loss * tokens
        sums = torch.stack([weighed.detach().float(), tokens.float()])
        self._sums = sums if self._sums is None else self._sums + sums
        part = self.coefficient * weighed
        return part if num_items_in_batch is None else part / num_items_in_batch

    def take(self) -> torch.Tensor | None:
        """Return the unweighted loss times tokens, and the tokens, since the last call."""
        sums = self._sums
        self._sums = None
        return sums
