"""Check before the first step whether a model keeps the rows of a line apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.notes import note
from workbench.base.errors import ConfigError
from workbench.finetune.recipe.lines import Lines, Row

_TOKENS = 64
"""Largest number of tokens of a row of the check."""
_EQUAL = 1e-3
"""Largest share of the largest score by which equal rows may differ, in batches of one shape."""
_NEAR = 0.05
"""The same for batches of different shapes: other kernels round differently, most in bf16."""


class LinesCheck(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Let a trainer pad each row by itself if a row reads other rows of its line.

    Batches of a causal model that are padded on the right leave out the mask, if the model scores
    the same without.
    """

    def __init__(self, trainer: Any, *, packed: bool) -> None:
        self.trainer = trainer
        self.packed = packed

    def on_train_begin(self, *_args: Any, **_options: Any) -> None:
        """Refuse packed rows that a model mixes.

        Every rank checks, because a forward pass can be collective.
        """
        trainer = self.trainer
        collator = trainer.data_collator
        rows = self._rows()
        if isinstance(collator, Lines):
            mixes = ranks.sums([float(not self._keeps_apart(rows))])[0] > 0
            if not mixes:
                return
            if not self.packed:
                collator.joins = False
                note(
                    "every row of a micro-batch is padded to the longest: rows that this model "
                    "reads in one line would read each other"
                )
        if self.packed:
            raise ConfigError(
                "packing is on, and in this model a packed text sees those before it; leave "
                "packing and tokens_per_micro_batch out"
            )
        if trainer.causal and trainer.balance is None and trainer.sequence is None:
            trainer.reads_mask = ranks.sums([float(self._reads_mask(rows))])[0] > 0

    def _rows(self) -> tuple[Row, Row]:
        """Return two short rows, the longer row first."""
        dataset = self.trainer.train_dataset
        rows = []
        for row in (dataset[0], dataset[min(1, len(dataset) - 1)]):
            # The first text of a packed row.
            starts = [n for n, at in enumerate(row.get("position_ids", ())) if at == 0]
            end = min([_TOKENS, *starts[1:2]])
            rows.append({name: list(row[name][:end]) for name in ("input_ids", "labels")})
        longer, shorter = sorted(rows, key=lambda row: len(row["labels"]), reverse=True)
        return longer, shorter

    def _keeps_apart(self, rows: tuple[Row, Row]) -> bool:
        collator = self.trainer.data_collator
        first, second = rows
        other = {**first, "input_ids": _replaced(first["input_ids"])}
        begin = len(first["labels"])
        end = begin + len(second["labels"])
        joined = self._scores(collator.of([[first, second]]))[0, begin:end]
        beside_other = self._scores(collator.of([[other, second]]))[0, begin:end]
        alone = self._scores(collator.alone([second, second]))[0, : end - begin]
        return _same(joined, beside_other, _EQUAL) and _same(joined, alone, _NEAR)

    def _reads_mask(self, rows: tuple[Row, Row]) -> bool:
        collator = self.trainer.data_collator
        batch = getattr(collator, "alone", collator)(rows)
        size = len(rows[1]["labels"])
        masked = self._scores(batch)[1, :size]
        self.trainer.reads_mask = False
        unmasked = self._scores(batch)[1, :size]
        return not _same(masked, unmasked, _NEAR)

    def _scores(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        model = self.trainer.model_wrapped
        inputs = self.trainer._prepare_inputs(self.trainer.read(batch))
        inputs.pop("labels")
        model.eval()
        with torch.no_grad():
            logits = model(**inputs).logits
        model.train()
        return torch.as_tensor(logits).float()


def _replaced(ids: Sequence[int]) -> list[int]:
    """Return other tokens in the place of all tokens."""
    tokens = max(ids) + 1
    return [(token + 1) % tokens for token in ids]


def _same(one: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    largest = float(one.abs().max())
    return torch.allclose(one, other, rtol=share, atol=share * largest)
