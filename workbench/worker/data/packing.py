"""Several texts in one row of a causal model, each of which sees only itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from workbench.base.errors import ConfigError
from workbench.worker.data.rows import Collator, Row

_KEYS = ("input_ids", "labels")


def packed(rows: Iterable[Row], most: int) -> Iterator[Row]:
    """Put rows together, in their order, up to so many tokens; positions begin anew with each text.

    Example:
        >>> rows = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [-100]}]
        >>> list(packed(rows, 4))
        [{'input_ids': [5, 6, 7], 'labels': [-100, 6, -100], 'position_ids': [0, 1, 0]}]
    """
    made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        length = len(row["input_ids"])
        if made["input_ids"] and len(made["input_ids"]) + length > most:
            yield made
            made = {name: [] for name in made}
        for key in _KEYS:
            made[key].extend(row[key])
        made["position_ids"].extend(range(length))
    yield made


class PackingCheck(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Look before the first step whether another first text changes what the model makes of the later ones."""

    def __init__(self, trainer: Any, collator: Collator) -> None:
        self.trainer = trainer
        self.collator = collator

    def on_train_begin(self, *_args: Any, **_options: Any) -> None:
        """Refuse a model that mixes texts; every rank looks, for a forward pass may take them all."""
        row = next((row for row in self.trainer.train_dataset if row["position_ids"].count(0) > 1), None)
        if row is None:
            return
        ids, end = list(row["input_ids"]), list(row["position_ids"]).index(0, 1)
        other = {**row, "input_ids": [*((i + 1) % (max(ids) + 1) for i in ids[:end]), *ids[end:]]}
        before, after = (self._logits(each)[:, end : len(ids)] for each in (row, other))
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
            raise ConfigError("packing is on, and in this model a packed text sees those before it; leave packing out")

    def _logits(self, row: Row) -> torch.Tensor:
        model = self.trainer.model_wrapped
        batch = self.trainer._prepare_inputs(self.collator([row, row]))
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        model.train()
        return torch.as_tensor(logits).float()
