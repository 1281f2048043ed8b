"""Answers of a model: to evaluation rows by all ranks together, or to any batch by one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer

from workbench.agent.rank import collectives as ranks
from workbench.agent.rank.phases import counted
from workbench.base.messages.rpc import OnPiece
from workbench.finetune.data.rows import Example
from workbench.finetune.data.scoring import Answer, judge
from workbench.finetune.data.training.rows import Row
from workbench.finetune.model.text.encode import Encoder, end_tokens


def predict(trainer: Any, encoder: Encoder, examples: Sequence[Example]) -> list[Answer]:
    """Answer questions greedily.

    Every rank must call this function, and rank 0 gets all answers.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    whole_rows: AbstractContextManager[None] = nullcontext()
    if trainer.sequence is not None:
        whole_rows = trainer.sequence.whole_rows()
    # Ranks that share weights answer the same rows, in step.
    sharers = 1 if trainer.tensor is None else trainer.tensor.size
    with whole_rows, ranks.alike(collective=trainer.forward_is_collective or sharers > 1):
        mine = answers(
            model,
            encoder,
            encoder.questions(examples),
            device=trainer.args.device,
            share=(ranks.rank() // sharers, ranks.world_size() // sharers),
            synced_gpus=trainer.forward_is_collective,
            follow=lambda calls: counted(calls, len(calls), "answering"),
        )
    parts = ranks.gather_bytes(json.dumps(mine).encode())
    everyone: dict[int, str] = {}
    for part in parts:
        for number, text in json.loads(part).items():
            everyone[int(number)] = text
    if ranks.rank() != 0:
        return []
    judged = []
    for number, row in enumerate(examples):
        # A row that rewards judge has no answer to compare with.
        expected = encoder.target(row) if row.target or not row.beside else None
        answer = judge(
            row.source,
            expected,
            everyone[number],
            table_id=row.table_id,
            input=row.input,
        )
        judged.append(answer)
    return judged


def scores(
    model: Any,
    encoder: Encoder,
    examples: Sequence[Example],
    *,
    device: torch.device,
    at_once: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> dict[int, float]:
    """Score questions with their answers, or one rank's share."""
    rank, world_size = share
    size = at_once or encoder.job.per_device_eval_batch_size
    order = list(range(len(examples)))
    mine = order[rank::world_size]
    rows = {
        number: encoder.rows([examples[number]], number + 1)[-1] for number in mine or order[:1]
    }
    found: dict[int, float] = {}
    model.eval()
    # As for answers, every rank makes the same number of forward passes.
    for begin in range(0, -(-len(order) // world_size), size):
        numbers = mine[begin : begin + size]
        batch = encoder.collator([rows[number] for number in numbers or list(rows)[:1]])
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            values = model(**inputs).logits[:, 0].float().tolist()
        found.update(zip(numbers, values, strict=False))
    return found


def predict_scores(
    trainer: Any,
    encoder: Encoder,
    examples: Sequence[Example],
    others: Sequence[Example],
) -> list[Answer]:
    """Score the answers of rows, and other answers to the same rows, and compare the scores.

    Every rank must call this function, and rank 0 gets all answers.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    share = (ranks.rank(), ranks.world_size())
    both = []
    with ranks.alike(collective=trainer.forward_is_collective):
        for rows in (examples, others):
            both.append(scores(model, encoder, rows, device=trainer.args.device, share=share))
    parts = ranks.gather_bytes(json.dumps(both).encode())
    found: list[dict[int, float]] = [{}, {}]
    for part in parts:
        for place, values in enumerate(json.loads(part)):
            found[place].update({int(number): value for number, value in values.items()})
    if ranks.rank() != 0:
        return []
    judged = []
    for number, row in enumerate(examples):
        chosen = found[0][number]
        rejected = found[1][number]
        said = f"chosen {chosen:.4f}, rejected {rejected:.4f}, margin {chosen - rejected:.4f}"
        # The texts differ always: an exact match means nothing.
        judged.append(Answer(source=row.source, expected=None, predicted=said, input=row.input))
    return judged


def answers(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Row],
    *,
    device: torch.device,
    at_once: int | None = None,
    share: tuple[int, int] = (0, 1),
    synced_gpus: bool = False,
    on_text: OnPiece | None = None,
    follow: Callable[[range], Iterable[int]] = iter,
) -> dict[int, str]:
    """Answer rows, or one rank's share, greedily. `on_text` gets the pieces of a single answer."""
    rank, world_size = share
    size = at_once or encoder.job.per_device_eval_batch_size
    # Rows of like length together need little padding.
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))
    mine = order[rank::world_size]
    texts: dict[int, str] = {}
    most = encoder.room(rows) if rows else 0
    late: dict[int, dict[int, list[int]]] = {}

    def call(numbers: Sequence[int], begun: Mapping[int, list[int]], **options: Any) -> None:
        said = _written(
            model,
            encoder,
            [(rows[n], begun.get(n, [])) for n in numbers],
            device,
            most,
            **options,
        )
        for n, (tokens, is_whole) in zip(numbers, said, strict=True):
            if is_whole:
                texts[n] = encoder.texts([tokens])[0]
            else:
                late.setdefault(len(tokens), {})[n] = tokens.tolist()

    # Under ZeRO-3 and FSDP a forward pass is a collective: every rank makes the same number of
    # calls, and repeats a row if it has none left.
    calls = -(-len(rows) // (world_size * size))  # rounded up
    for number in follow(range(calls)):
        begin = number * size
        numbers = mine[begin : begin + size]
        call(numbers or order[:1], {}, synced_gpus=synced_gpus, on_text=on_text)
    while late:
        begun = late.pop(min(late))
        waiting = list(begun)
        for first in range(0, len(waiting), size):
            call(waiting[first : first + size], begun)
    return {n: texts[n] for n in mine}


GREEDY: Mapping[str, object] = {
    "do_sample": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "is_assistant": False,
    "token_healing": False,
    "cache_implementation": None,
    "cache_config": None,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_logits": False,
    "output_scores": False,
}
"""Settings of a greedy answer: the model's settings for other ways of decoding have no effect.

A cache of another kind writes the same tokens, and may need a package or a GPU.
"""
_PENALTIES = ("repetition_penalty", "encoder_repetition_penalty")
"""Settings that change the scores of all tokens of the prompt, padding among them."""
_ALIKE_IN_A_LATER_CALL = frozenset(
    (
        *GREEDY,
        *("_from_model_config", "transformers_version", "disable_compile", "low_memory"),
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"),
        *("max_length", "max_new_tokens", "use_cache", "early_stopping", "length_penalty"),
        *("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "suppress_tokens", "remove_invalid_values"),
    )
)
"""Settings that count no tokens.

Other settings count tokens from the end of the prompt, or read the padding, which a later call has
not.
"""
_FEW = 8
"""Number of rows below which no row is removed from a call: fewer rows save no time."""
_LOOK = 16
"""Number of tokens before ended rows may be removed for the first time; doubled afterwards."""


class _Pieces(TextStreamer):  # type: ignore[misc]  # transformers publishes no types
    """Emit text as soon as its words are whole."""

    def __init__(self, tokenizer: Any, on_text: OnPiece) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, **_: bool) -> None:
        if text:
            self._on_text(text)


class _Late(StoppingCriteria):  # type: ignore[misc]  # transformers publishes no types
    """End a call when half of its rows have ended.

    The others continue in a later call.
    """

    def __init__(self, begin: int, has_ended: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._begin = begin
        self._has_ended = has_ended

    def __call__(self, tokens: torch.Tensor, _scores: object, **_: object) -> torch.Tensor:
        times, rest = divmod(tokens.shape[1] - self._begin, _LOOK)
        is_power_of_two = times > 0 and not times & (times - 1)
        half = False
        if is_power_of_two and not rest:
            ended = int(self._has_ended(tokens).sum())
            half = 2 * ended >= len(tokens)
        return torch.full_like(tokens[:, 0], half, dtype=torch.bool)


class _Least(LogitsProcessor):  # type: ignore[misc]  # transformers publishes no types
    """Forbid the end of a row before question and answer have a number of tokens.

    The processor of transformers counts the padding too, so other rows would change an answer.
    """

    def __init__(self, least: int, padding: torch.Tensor, ends: torch.Tensor) -> None:
        self._least = least + padding
        self._ends = ends

    def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_short = self._least > tokens.shape[1]
        is_end = torch.isin(torch.arange(scores.shape[1], device=scores.device), self._ends)
        return scores.masked_fill(is_short[:, None] & is_end, -torch.inf)


def _without_padding(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return tokens with a row's first token in place of padding, which may be the end token."""
    first = tokens.gather(1, mask.argmax(1, keepdim=True))
    return torch.where(mask.bool(), tokens, first)


def _start(model: Any) -> int:
    """Return the token with which `generate` begins an answer."""
    start = model.generation_config.decoder_start_token_id
    return int(model.config.decoder_start_token_id if start is None else start)


def _continues(settings: Any) -> bool:
    """Return whether a later call may continue a row as the first call would."""
    given = settings.to_dict()
    return all(name in _ALIKE_IN_A_LATER_CALL for name, value in given.items() if value)


@torch.no_grad()
def _written(
    model: Any,
    encoder: Encoder,
    rows: Sequence[tuple[Row, list[int]]],
    device: torch.device,
    most: int,
    *,
    synced_gpus: bool = False,
    on_text: OnPiece | None = None,
) -> list[tuple[torch.Tensor, bool]]:
    """Continue rows of equal length; return every row's tokens, and whether the row has ended."""
    said = torch.tensor([tokens for _, tokens in rows], dtype=torch.long, device=device)
    batch = encoder.asking([row for row, _ in rows])
    given = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    begin = given["input_ids"].shape[1] if encoder.causal else 1
    if encoder.causal:
        given = {
            "input_ids": torch.cat([given["input_ids"], said], 1),
            "attention_mask": torch.cat([given["attention_mask"], torch.ones_like(said)], 1),
        }
    elif said.numel():
        start = torch.full_like(said[:, :1], _start(model))
        given["decoder_input_ids"] = torch.cat([start, said], 1)
    settings = model.generation_config
    ends = torch.tensor(end_tokens(settings), device=device)
    if any((getattr(settings, name, None) or 1) != 1 for name in _PENALTIES):
        given["input_ids"] = _without_padding(given["input_ids"], given["attention_mask"])
    greedy = {name: value for name, value in GREEDY.items() if hasattr(settings, name)}
    processors = []
    if encoder.causal and settings.min_length:
        padding = (given["attention_mask"] == 0).sum(1)
        processors.append(_Least(settings.min_length, padding, ends))
        greedy["min_length"] = 0

    def has_ended(tokens: torch.Tensor) -> torch.Tensor:
        return torch.isin(tokens[:, begin:], ends).any(1)

    criteria = None
    if len(rows) > _FEW and not synced_gpus and _continues(settings):
        criteria = [_Late(begin, has_ended)]
    streamer = None
    if on_text is not None and len(rows) == 1:
        streamer = _Pieces(encoder.tokenizer, on_text)
    model.eval()
    tokens = model.generate(
        **given,
        max_new_tokens=most - said.shape[1],
        **greedy,
        logits_processor=processors,
        use_cache=True,
        # Texts that end an answer are found in its text.
        tokenizer=encoder.tokenizer,
        pad_token_id=encoder.tokenizer.pad_token_id,
        synced_gpus=synced_gpus,
        stopping_criteria=criteria,
        streamer=streamer,
    )
    is_full = criteria is None or tokens.shape[1] - begin >= most
    is_whole = has_ended(tokens) | is_full
    return list(zip(tokens[:, begin:], is_whole.tolist(), strict=True))
