"""Rows of a method as tokens, in the columns that TRL's trainers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from datasets.arrow_writer import ArrowWriter

from workbench.finetune.data.rows import Example
from workbench.finetune.methods.rows import with_rejected
from workbench.finetune.recipe.order import IGNORED

Tokens = list[int]
TokenRow = Mapping[str, Any]


def pair(encoder: Any, example: Example, number: int) -> tuple[Tokens, Tokens, Tokens]:
    """Return the tokens of the prompt, of the chosen and of the rejected answer."""
    chosen_prompt, chosen = answered(encoder, example, number)
    rejected_prompt, rejected = answered(encoder, with_rejected(example), number)
    shared = 0
    for one, other in zip(chosen_prompt, rejected_prompt, strict=False):
        if one != other:
            break
        shared += 1
    # A token across the end of the prompt belongs to the answers.
    return (
        chosen_prompt[:shared],
        chosen_prompt[shared:] + chosen,
        rejected_prompt[shared:] + rejected,
    )


def answered(encoder: Any, example: Example, number: int) -> tuple[Tokens, Tokens]:
    """Return the tokens of a row's prompt and of its answer, cut as in other training."""
    made = encoder.rows([example], number)[-1]
    ids = list(made["input_ids"])
    begin = next(n for n, label in enumerate(made["labels"]) if label != IGNORED)
    return ids[:begin], ids[begin:]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenRows:
    """Rows of a file that is read as memory."""

    dataset: Dataset | None
    """Rows in the columns of TRL's trainer; None without rows."""
    lengths: Any
    """Tokens of the prompt and of the longest answer, rows x 2."""
    equal: int
    """Number of pairs whose answers are the same tokens."""


def written(rows: Iterable[TokenRow], folder: Path, name: str) -> WrittenRows:
    """Write rows into a file that is read as memory."""
    disable_progress_bars()
    sizes: list[tuple[int, int]] = []
    equal = 0
    path = folder / f"{name}.arrow"
    writer = ArrowWriter(path=str(path))
    for row in rows:
        sizes.append(_sizes(row))
        equal += _are_equal(row)
        writer.write(dict(row))
    if not sizes:
        return WrittenRows(
            dataset=None, lengths=torch.zeros((0, 2), dtype=torch.int64), equal=equal
        )
    writer.finalize()
    writer.close()
    dataset = Dataset.from_file(str(path))
    return WrittenRows(dataset=dataset, lengths=torch.tensor(sizes), equal=equal)


def _are_equal(row: TokenRow) -> bool:
    """Return whether both answers of a pair are the same tokens; False for other rows."""
    chosen = [name for name in row if name.startswith("chosen")]
    same = [row[name] == row[name.replace("chosen", "rejected")] for name in chosen]
    return bool(same) and all(same)


def _sizes(row: TokenRow) -> tuple[int, int]:
    lengths = {name: len(value) for name, value in row.items() if isinstance(value, list)}
    prompt = max((lengths[name] for name in lengths if name.startswith("prompt")), default=0)
    answers = [lengths[name] for name in lengths if not name.startswith("prompt")]
    return prompt, max(answers, default=0)
