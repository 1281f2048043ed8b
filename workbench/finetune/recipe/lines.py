"""Rows of a micro-batch joined to lines, so that a batch has almost no padding.

No row reads another row of its line. A causal model separates rows by positions that restart at
every row. T5 gets masks, because its positions are distances within a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workbench.finetune.recipe.order import IGNORED, pad, padded

Row = Mapping[str, Sequence[int]]
Batch = dict[str, torch.Tensor]

LINE_TOKENS = 512
"""Least limit of a line under an attention that scores every pair of a line's tokens.

The scores of longer lines would cost more than the padding that they save.
"""
BIASED_LINE_TOKENS = 128
"""The same for a T5, whose attention keeps a bias for every pair of tokens in memory."""
_FLASH = ("flash_attention_2", "flash_attention_3")
_MASKED = ("t5", "mt5", "umt5")
"""Model types of encoder-decoders whose rows can be separated by masks."""


def collator_of(
    model: Any, pad_id: int, start_id: int | None, training: Mapping[str, object]
) -> Callable[[Sequence[Row]], Batch]:
    """Return the collator for learning, which joins rows to lines if the model can separate rows.

    `start_id` is the first token of a decoder; None for causal models. `training` are arguments of
    the Trainer.
    """
    alone = partial(pad, pad_id=pad_id, start_id=start_id)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    most = line_tokens(base, training)
    if most is None:
        return alone
    if start_id is not None:
        separate_by_masks(base)
    else:
        AttentionInterface.register("sdpa", attend_by_row)
    return Lines(alone, pad_id=pad_id, start_id=start_id, most=most)


def line_tokens(model: Any, training: Mapping[str, object]) -> int | None:
    """Return the largest number of tokens of a line; None for rows that stay separate."""
    # The noise of NEFTune is smaller in longer rows, and torch compiles more graphs for lines.
    if training.get("neftune_noise_alpha") or training.get("torch_compile"):
        return None
    attention = model.config._attn_implementation
    if model.config.is_encoder_decoder:
        masked = model.config.model_type in _MASKED and attention == "sdpa"
        return BIASED_LINE_TOKENS if masked else None
    if "position_ids" not in signature(model.forward).parameters:
        return None
    # FlashAttention scores only pairs of tokens of the same row, and reads a single line.
    return sys.maxsize if attention in _FLASH else LINE_TOKENS


class Lines:
    """Collator that joins rows to lines, or pads each row by itself."""

    def __init__(
        self,
        alone: Callable[[Sequence[Row]], Batch],
        *,
        pad_id: int,
        start_id: int | None,
        most: int,
    ) -> None:
        """Set up with the collator of separate rows, and the largest number of tokens of a line.

        `start_id` is the first token of a decoder; None for causal models.
        """
        self.alone = alone
        self.joins = True
        """Whether to join rows."""
        self.most = most
        self._pad_id = pad_id
        self._start_id = start_id

    def __call__(self, rows: Sequence[Row]) -> Batch:
        if not self.joins:
            return self.alone(rows)
        lines = filled(rows, self.most)
        if sum(size_of(lines)) >= sum(size_of([[row] for row in rows])):
            # Rows of one length have no padding.
            return self.alone(rows)
        return self.of(lines)

    def of(self, lines: Sequence[Sequence[Row]]) -> Batch:
        """Return the batch of these lines."""
        if self._start_id is None:
            return self.alone([_joined(line) for line in lines])
        return _masked(lines, self._pad_id, self._start_id)


def filled(rows: Sequence[Row], most: int) -> list[list[Row]]:
    """Distribute rows evenly over lines of about `most` tokens, or as many as the longest row.

    Example:
        >>> rows = [{"input_ids": [0] * size, "labels": [0] * size} for size in (3, 5, 2, 4)]
        >>> [[len(row["labels"]) for row in line] for line in filled(rows, 7)]
        [[5, 2], [4, 3]]
    """
    sizes = [_sizes(row) for row in rows]
    most = max(most, *map(max, sizes))
    tokens = max(sum(column) for column in zip(*sizes, strict=True))
    lines: list[list[Row]] = [[] for _ in range(-(-tokens // most))]
    # The longest rows first, each into the emptiest line.
    for row in sorted(rows, key=_sizes, reverse=True):
        min(lines, key=lambda line: sum(sum(_sizes(other)) for other in line)).append(row)
    return lines


def size_of(lines: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Return the numbers of input tokens and of labels of a batch, padding included."""
    inputs = max(sum(len(row["input_ids"]) for row in line) for line in lines)
    labels = max(sum(len(row["labels"]) for row in line) for line in lines)
    return len(lines) * inputs, len(lines) * labels


def _sizes(row: Row) -> tuple[int, int]:
    return len(row["input_ids"]), len(row["labels"])


def _joined(line: Sequence[Row]) -> dict[str, list[int]]:
    """Return a line of a causal model as a row."""
    made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in line:
        ids = row["input_ids"]
        made["input_ids"].extend(ids)
        # The token before the row belongs to another row, and predicts nothing here.
        made["labels"].extend([IGNORED, *row["labels"][1:]])
        made["position_ids"].extend(row.get("position_ids", range(len(ids))))
    return made


def _masked(lines: Sequence[Sequence[Row]], pad_id: int, start_id: int) -> Batch:
    """Return lines of an encoder-decoder, with the number of its row for every token."""
    columns: dict[str, list[list[int]]] = {
        name: [[] for _ in lines]
        for name in ("input_ids", "texts", "labels", "decoder_input_ids", "decoder_texts")
    }
    for number, line in enumerate(lines):
        for text, row in enumerate(line, 1):
            ids, labels = row["input_ids"], row["labels"]
            columns["input_ids"][number].extend(ids)
            columns["texts"][number].extend([text] * len(ids))
            columns["labels"][number].extend(labels)
            columns["decoder_input_ids"][number].extend([start_id, *labels[:-1]])
            columns["decoder_texts"][number].extend([text] * len(labels))
    fills = {"texts": 0, "decoder_texts": 0, "labels": IGNORED}
    batch = {name: padded(lists, fills.get(name, pad_id)) for name, lists in columns.items()}
    batch["attention_mask"] = batch["texts"].ne(0).long()
    return batch


def separate_by_masks(model: Any) -> None:
    """Let the forward pass of a T5 read lines: each row reads only tokens of its own number."""
    forward = model.forward

    @wraps(forward)
    def separated(
        *args: Any,
        texts: torch.Tensor | None = None,
        decoder_texts: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        if texts is None or decoder_texts is None:
            return forward(*args, **inputs)
        own = _seen(texts, texts)
        encoded = model.encoder(input_ids=inputs.pop("input_ids"), attention_mask=own)
        inputs["encoder_outputs"] = encoded
        inputs["attention_mask"] = _seen(decoder_texts, texts)
        inputs["decoder_attention_mask"] = _seen(decoder_texts, decoder_texts).tril()
        return forward(*args, **inputs)

    model.forward = separated


def _seen(reading: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return which tokens read which; the padding may read all, as nothing reads the padding."""
    same = reading[:, :, None] == read[:, None, :]
    return (same | reading.eq(0)[:, :, None])[:, None]


def attend_by_row(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> Any:
    """Attend like transformers' sdpa, but on a CPU score only pairs of tokens of the same row."""
    attend = partial(sdpa_attention_forward, module, **options)
    sizes = None
    # A GPU would wait for the sizes, and start a kernel for each row.
    if query.device.type == "cpu" and attention_mask is not None:
        sizes = _sizes_of_rows(options.get("position_ids"), query, attention_mask)
    if sizes is None or attention_mask is None:
        return attend(query, key, value, attention_mask)
    lines, width = len(query), query.shape[2]
    masks = attention_mask.expand(lines, 1, width, width)
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    by_row = [torch.split(each, sizes) for each in flat]
    attended = []
    begin = 0
    for row in zip(*by_row, strict=True):
        line, first = divmod(begin, width)
        end = first + len(row[0])
        own = masks[line : line + 1, :, first:end, first:end]
        scored, _ = attend(*(each.transpose(0, 1)[None] for each in row), own)
        attended.append(scored[0])
        begin += len(row[0])
    return torch.cat(attended).view(lines, width, *attended[0].shape[1:]), None


def _sizes_of_rows(
    positions: torch.Tensor | None, query: torch.Tensor, mask: torch.Tensor
) -> list[int] | None:
    """Return the tokens of every row, from positions that restart at every row.

    None: a line is a single row, or the model has a mask of its own kind.
    """
    lines, width = len(query), query.shape[2]
    is_mask_of_lines = mask.shape[1:] == (1, width, width)
    if positions is None or positions.shape != (lines, width) or not is_mask_of_lines:
        return None
    begins = positions.eq(0)
    # Padding has only zeros, and counts as a row.
    begins[:, 1:] &= positions[:, :-1].ne(0)
    begins[:, 0] = True
    firsts: list[int] = begins.flatten().nonzero().flatten().tolist()
    if len(firsts) == lines:
        return None
    return [end - first for first, end in pairwise([*firsts, lines * width])]
