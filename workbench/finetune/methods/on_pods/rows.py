"""Rows of a method as tokens, in the columns that TRL's trainers read."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from datasets.arrow_writer import ArrowWriter

from workbench.finetune.data.rows import Example
from workbench.finetune.data.training.pod_rows import SharedRows
from workbench.finetune.methods.rows import with_rejected
from workbench.finetune.options.text.lengths import TextLengths
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
    texts: TextLengths
    """Lengths of the rows' texts."""


def write_rows(rows: SharedRows, folder: Path, name: str) -> None:
    """Write rows into files for `read_rows`."""
    sizes = array("i")
    writer = ArrowWriter(path=str(folder / f"{name}.arrow"))
    for each in rows:
        row = {name: list(v) if isinstance(v, array) else v for name, v in each.items()}
        sizes.extend((*_sizes(row), _are_equal(row)))
        writer.write(row)
    # A file without rows has no columns, and cannot be finished.
    if sizes:
        writer.finalize()
    writer.close()
    with (folder / f"{name}.sizes").open("wb") as file:
        file.write(json.dumps(asdict(rows.texts)).encode() + b"\n")
        file.write(sizes)


def read_rows(folder: Path, name: str) -> WrittenRows:
    """Map the rows of a file into memory. The rows stay readable without the folder."""
    disable_progress_bars()
    with (folder / f"{name}.sizes").open("rb") as file:
        texts = TextLengths(**json.loads(file.readline()))
        sizes = array("i", file.read())
    columns = torch.tensor(sizes, dtype=torch.int64).view(-1, 3)
    return WrittenRows(
        dataset=Dataset.from_file(str(folder / f"{name}.arrow")) if sizes else None,
        lengths=columns[:, :2],
        equal=int(columns[:, 2].sum()),
        texts=texts,
    )


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
