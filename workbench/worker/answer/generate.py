"""A model's answers: to evaluation rows by all ranks together, or to any batch by one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, TextStreamer

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
    at_once: int | None = None,
    share: tuple[int, int] = (0, 1),
    synced_gpus: bool = False,
    on_text: Callable[[str], None] | None = None,
    follow: Callable[[range], Iterable[int]] = iter,
) -> dict[int, str]:
    """Let a model answer rows, or one rank's share, greedily; `on_text` gets each piece of a single answer."""
    rank, world_size = share
    size = at_once or encoder.job.per_device_eval_batch_size
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


_FEW = 8
"""Rows of which none is left out of a call: a step of fewer takes as long."""


class _Pieces(TextStreamer):  # type: ignore[misc]  # transformers publishes no types
    """Hands on what is written as soon as it is whole words."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, **_: bool) -> None:
        if text:
            self._on_text(text)


class _Half(StoppingCriteria):  # type: ignore[misc]  # transformers publishes no types
    """Ends a call once half of its rows have ended, so that the others go on without them."""

    def __init__(self, has_ended: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._has_ended, self.reached = has_ended, False

    def __call__(self, tokens: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        ended = self._has_ended(tokens)
        self.reached = 2 * int(ended.sum()) >= len(ended)
        return torch.full_like(ended, self.reached)


def _answer(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Row],
    device: torch.device,
    synced_gpus: bool,
    on_text: Callable[[str], None] | None,
) -> list[str]:
    batch = encoder.asking(rows)
    given = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    begin, most = given["input_ids"].shape[1] if encoder.causal else 1, encoder.job.max_target_length
    ends = torch.tensor(model.generation_config.eos_token_id or [], device=device)

    def has_ended(tokens: torch.Tensor) -> torch.Tensor:
        return torch.isin(tokens[:, begin:], ends).any(1)

    model.eval()
    texts: dict[int, str] = {}
    left, written = list(range(len(rows))), 0
    while left:
        half = _Half(has_ended)
        with torch.no_grad():
            tokens = model.generate(
                **given,
                max_new_tokens=most - written,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                pad_token_id=encoder.tokenizer.pad_token_id,
                synced_gpus=synced_gpus,
                stopping_criteria=[half] if len(left) > _FEW and not synced_gpus else None,
                streamer=_Pieces(encoder.tokenizer, on_text) if on_text is not None and len(rows) == 1 else None,
            )
        written = tokens.shape[1] - begin
        goes_on = ~has_ended(tokens) if half.reached and written < most else torch.zeros_like(tokens[:, 0] > 0)
        said = iter(encoder.texts(tokens[~goes_on, begin if encoder.causal else 0 :]))
        texts |= {row: next(said) for row, more in zip(left, goes_on.tolist(), strict=True) if not more}
        left = [row for row in left if row not in texts]
        given = {name: values[goes_on] for name, values in given.items()}
        if encoder.causal:
            mask = given["attention_mask"]
            more = mask.new_ones(len(left), tokens.shape[1] - mask.shape[1])
            given = {"input_ids": tokens[goes_on], "attention_mask": torch.cat([mask, more], dim=1)}
        else:
            given["decoder_input_ids"] = tokens[goes_on]
    return [texts[row] for row in range(len(rows))]
