"""TRL's trainer of `kto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trl import KTOConfig as Arguments
from trl import KTOTrainer as Base

from workbench.finetune.data.rows import Example
from workbench.finetune.methods.on_pods.hooks import ReferenceHooks
from workbench.finetune.methods.on_pods.rows import TokenRow, answered
from workbench.finetune.methods.rows import LABEL

__all__ = ["UNCUT", "Arguments", "Base", "Hooks", "token_rows"]

UNCUT = {"max_length": None}
"""Arguments by which TRL cuts no row: rows are cut as in other training."""


class Hooks(ReferenceHooks):
    """Pair each prompt of a micro-batch with the answer of another row, for the divergence.

    TRL pairs neighbours in the dataset, and so asks for rows in order. The collator pairs the rows
    of a micro-batch in any order.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.calculate_KL:  # type: ignore[attr-defined]
            return
        collate = self.data_collator  # type: ignore[has-type]

        def paired(rows: list[dict[str, Any]]) -> Any:
            answers = [row["completion_ids"] for row in rows]
            others = [answers[-1], *answers[:-1]]
            return collate(
                [
                    {**row, "KL_completion_ids": other}
                    for row, other in zip(rows, others, strict=True)
                ]
            )

        self.data_collator = paired

    def weighed(
        self, figures: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, float, float]]:
        good = sum(row["label"] for row in rows) / len(rows)
        for name, mean, share in super().weighed(figures, rows):
            # TRL takes these means over the good or over the bad answers alone.
            if name.endswith("/chosen"):
                yield name, mean, good
            elif name.endswith("/rejected"):
                yield name, mean, 1 - good
            else:
                yield name, mean, share

    def completed(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures with the margin between all good and all bad answers."""
        good = figures.get("rewards/chosen")
        bad = figures.get("rewards/rejected")
        if good is not None and bad is not None:
            figures["rewards/margins"] = good - bad
        return figures


def token_rows(encoder: Any, examples: Sequence[Example], first: int) -> list[TokenRow]:
    """Return the examples as tokens. `first` is the number of the first row in errors."""
    rows: list[TokenRow] = []
    for number, example in enumerate(examples, first):
        prompt, answer = answered(encoder, example, number)
        rows.append(
            {
                "prompt_ids": prompt,
                "completion_ids": answer,
                "label": bool(example.beside[LABEL]),
            }
        )
    return rows
