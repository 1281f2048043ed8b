"""A model's answers: to evaluation rows by all ranks together, or to any batch by one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import TextStreamer

from workbench.jobs.data.rows import Example
from workbench.rundir.answers import Answer, judge
from workbench.worker.data.rows import Row
from workbench.worker.model.encode import Encoder
from workbench.worker.rank import collectives as ranks
from workbench.worker.rank.phases import counted


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
            follow=lambda calls: counted(calls, len(calls), "answering"),
        )
    parts = ranks.gather_bytes(json.dumps(mine).encode())
    everyone = {int(n): text for part in parts for n, text in json.loads(part).items()}
    if ranks.rank() != 0:
        return []
    return [
        judge(row.source, encoder.target(row), everyone[n], table_id=row.table_id, input=row.input)
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
    on_text: Callable[[str], None] | None = None,
    follow: Callable[[range], Iterable[int]] = iter,
) -> dict[int, str]:
    """Let a model answer rows, or one rank's share, greedily; `on_text` gets each piece of a single answer."""
    rank, world_size = share
    size = encoder.job.per_device_eval_batch_size
    # Rows of like length together need little padding.
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))
    mine = order[rank::world_size]
    texts: dict[int, str] = {}
    # Under ZeRO-3 and FSDP each forward pass is a collective: every rank makes the same number of calls, with a row
    # of no use where it has run out of its own.
    for call in follow(range(-(-len(rows) // (world_size * size)))):
        numbers = mine[call * size : (call + 1) * size]
        batch = [rows[n] for n in numbers] or [rows[order[0]]]
        texts.update(zip(numbers, _answer(model, encoder, batch, device, synced_gpus, on_text), strict=False))
    return texts


class _Pieces(TextStreamer):  # type: ignore[misc]  # transformers publishes no types
    """Hands on what is written as soon as it is whole words."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, **_: bool) -> None:
        if text:
            self._on_text(text)


def _answer(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Row],
    device: torch.device,
    synced_gpus: bool,
    on_text: Callable[[str], None] | None,
) -> list[str]:
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
            streamer=_Pieces(encoder.tokenizer, on_text) if on_text is not None and len(rows) == 1 else None,
        )
    begin = batch["input_ids"].shape[1] if encoder.causal else 0
    return encoder.texts(tokens[:, begin:])
