"""A model's answers: to evaluation rows by all ranks together, or to any batch by one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from workbench.rundir.answers import Answer, judge
from workbench.worker.data.rows import Example, Row
from workbench.worker.model.encode import Encoder
from workbench.worker.rank import collectives as ranks

__all__ = ["answers", "predict"]


def predict(trainer: Any, encoder: Encoder, examples: Sequence[Example]) -> list[Answer]:
    """Let the model answer, greedily; every rank must call it, and rank 0 gets all answers."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with ranks.alike(collective=trainer.forward_is_collective):
        mine = answers(
            model,
            encoder,
            encoder.questions(examples),
            device=trainer.args.device,
            share=(ranks.rank(), ranks.world_size()),
            synced_gpus=trainer.forward_is_collective,
        )
    parts = ranks.gather_bytes(json.dumps(mine).encode())
    everyone = {int(n): text for part in parts for n, text in json.loads(part).items()}
    if ranks.rank() != 0:
        return []
    return [
        judge(row.source, row.target, everyone[n], table_id=row.table_id, input=row.input)
        for n, row in enumerate(examples)
    ]


def answers(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Row],
    *,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
    synced_gpus: bool = False,
) -> dict[int, str]:
    """Let a model answer rows, greedily, or the share of one rank of so many; return the answers by row number."""
    rank, world_size = share
    size = encoder.job.per_device_eval_batch_size
    # Rows of like length together need little padding.
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))
    mine = order[rank::world_size]
    texts: dict[int, str] = {}
    # Under ZeRO-3 and FSDP each forward pass is a collective: every rank makes the same number of calls, with a row
    # of no use where it has run out of its own.
    for call in range(-(-len(rows) // (world_size * size))):
        numbers = mine[call * size : (call + 1) * size]
        batch = [rows[n] for n in numbers] or [rows[order[0]]]
        texts.update(zip(numbers, _answer(model, encoder, batch, device, synced_gpus), strict=False))
    return texts


def _answer(model: Any, encoder: Encoder, rows: Sequence[Row], device: torch.device, synced_gpus: bool) -> list[str]:
    batch = encoder.asking(rows)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            input_ids=batch["input_ids"].to(device),
            attention_mask=batch["attention_mask"].to(device),
            max_new_tokens=encoder.job.max_target_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=encoder.tokenizer.pad_token_id,
            synced_gpus=synced_gpus,
        )
    begin = batch["input_ids"].shape[1] if encoder.causal else 0
    return encoder.texts(tokens[:, begin:])
