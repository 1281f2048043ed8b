"""A model's answers: to evaluation rows by all ranks together, or to any batch by one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.jobs import ranks
from workbench.jobs.data import Collator, Example, Row

__all__ = ["Prediction", "answer", "exact_match", "judge", "predict", "write_predictions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A row and what the model answered."""

    source: str
    """What the model read."""
    expected: str
    """What it should have written."""
    predicted: str
    """What it wrote."""
    exact_match: bool
    """Whether the two are the same text, apart from white space."""
    table_id: str | None = None
    """The table that was asked, where there is one."""


def predict(
    trainer: Any, tokenizer: Any, examples: Sequence[Example], rows: Sequence[Row], *, batch_size: int, max_length: int
) -> list[Prediction]:
    """Let the model answer, greedily; every rank must call it, and rank 0 gets all answers.

    Args:
        trainer: The Trainer after training.
        tokenizer: The model's tokenizer.
        examples: The rows as text.
        rows: The same rows as tokens.
        batch_size: Rows that a rank answers at once.
        max_length: Tokens after which an answer ends.

    Returns:
        On rank 0 the predictions in the order of the rows, elsewhere none.
    """
    collate = trainer.data_collator
    rank, world_size = ranks.rank(), ranks.world_size()
    mine = list(range(rank, len(rows), world_size))
    answers: dict[int, str] = {}
    # Under ZeRO-3 each forward pass is a collective: every rank makes the same number of calls, with a row of no
    # use where it has run out of its own.
    calls = -(-len(rows) // (world_size * batch_size))
    for call in range(calls):
        numbers = mine[call * batch_size : (call + 1) * batch_size]
        texts = _generate(trainer, tokenizer, collate, [rows[n] for n in numbers] or [rows[0]], max_length)
        answers.update(zip(numbers, texts, strict=False))
    parts = ranks.gather_bytes(json.dumps(answers).encode())
    everyone = {int(n): text for part in parts for n, text in json.loads(part).items()}
    if rank != 0:
        return []
    return [judge(example, everyone[n]) for n, example in enumerate(examples)]


def answer(
    model: Any,
    tokenizer: Any,
    batch: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    max_length: int,
    synced_gpus: bool = False,
) -> list[str]:
    """Let a model answer one batch, greedily.

    Args:
        model: An encoder-decoder model.
        tokenizer: Its tokenizer.
        batch: `input_ids` and `attention_mask`, each (batch, source length).
        device: Where the model is.
        max_length: Tokens after which an answer ends.
        synced_gpus: Go on until every rank is done; needed where a forward pass is a collective.
    """
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            input_ids=batch["input_ids"].to(device),
            attention_mask=batch["attention_mask"].to(device),
            max_new_tokens=max_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            synced_gpus=synced_gpus,
        )
    return [str(text) for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def judge(example: Example, predicted: str) -> Prediction:
    """Compare an answer with the expected one, apart from white space."""
    same = " ".join(predicted.split()) == " ".join(example.target.split())
    return Prediction(
        source=example.source,
        expected=example.target,
        predicted=predicted,
        exact_match=same,
        table_id=example.table_id,
    )


def exact_match(predictions: Sequence[Prediction]) -> float | None:
    """Give the share of exact answers; None for no predictions."""
    return sum(p.exact_match for p in predictions) / len(predictions) if predictions else None


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Write one JSON object a line."""
    lines = [json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in predictions]
    path.write_text("".join(lines), encoding="utf-8")


def _generate(trainer: Any, tokenizer: Any, collate: Collator, rows: Sequence[Row], max_length: int) -> list[str]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    synced = ranks.world_size() > 1 and _is_zero3(trainer)
    return answer(
        model, tokenizer, collate(rows), device=trainer.args.device, max_length=max_length, synced_gpus=synced
    )


def _is_zero3(trainer: Any) -> bool:
    engine = getattr(trainer, "deepspeed", None)
    return engine is not None and int(engine.zero_optimization_stage()) == 3
