"""Rows in lines: each row has the loss that it has alone, and almost no token is padding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from workbench.finetune.data.training.rows import Row
from workbench.finetune.model import tiny
from workbench.finetune.recipe.lean_loss import LeanLoss
from workbench.finetune.recipe.lines import Lines, collator_of, filled
from workbench.finetune.recipe.order import IGNORED, GlobalBatchSampler, pad
from workbench.finetune.recipe.standalone import TokenTrainer
from workbench.finetune.train.lines_check import LinesCheck

CPU = torch.device("cpu")
VOCABULARY = 40


def llama(attention: str = "sdpa") -> Any:
    model = tiny.make("tiny-llama", range(VOCABULARY), seed=0)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.eval()


def t5(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.eval()


MODELS = {
    "llama-sdpa": llama,
    "llama-eager": partial(llama, "eager"),
    "t5-sdpa": t5,
}


def rows_of(model: Any, count: int = 9, longest: int = 30) -> list[Row]:
    draw = torch.Generator().manual_seed(1)

    def ids(most: int) -> list[int]:
        size = int(torch.randint(1, most, (1,), generator=draw))
        return torch.randint(3, VOCABULARY, (size,), generator=draw).tolist()

    rows: list[Row] = []
    for _ in range(count):
        asked, answer = ids(longest), ids(longest // 2)
        if model.config.is_encoder_decoder:
            rows.append({"input_ids": asked, "labels": answer})
        else:
            rows.append(
                {"input_ids": asked + answer, "labels": [IGNORED] * len(asked) + answer}
            )
    return rows


def collator(model: Any) -> Lines:
    start = 0 if model.config.is_encoder_decoder else None
    made = collator_of(model, 0, start, {})
    assert isinstance(made, Lines)
    return made


def loss_of(model: Any, batch: dict[str, torch.Tensor], smoothing: float = 0.0) -> torch.Tensor:
    causal = not model.config.is_encoder_decoder
    lean = getattr(model, "_lean", None) or LeanLoss(model, causal=causal)
    object.__setattr__(model, "_lean", lean)
    inputs = TokenTrainer.read(SimpleNamespace(reads_mask=True), dict(batch))
    labels = inputs.pop("labels")
    with lean.of(labels, CPU, smoothing=smoothing):
        outputs = model(**inputs)
    return lean.total(outputs, labels, smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("most", [1, 40, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_padded_rows(
    name: str, most: int, smoothing: float
) -> None:
    model = MODELS[name]()
    rows = rows_of(model)
    collate = collator(model)
    collate.most = most
    found = []
    for joins in (True, False):
        collate.joins = joins
        model.zero_grad()
        loss = loss_of(model, collate(rows), smoothing)
        (loss / 100).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((float(loss), gradients))
    (joined, ours), (alone, theirs) = found
    assert joined == pytest.approx(alone, rel=1e-6)
    assert ours.keys() == theirs.keys()
    for weight, gradient in theirs.items():
        assert (ours[weight] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, weight


@pytest.mark.parametrize("name", MODELS)
def test_no_row_reads_another_row_of_its_line(name: str) -> None:
    """The other rows' scores do not change with one row, wherever it stands."""
    model = MODELS[name]()
    rows = rows_of(model)
    collate = collator(model)
    (line,) = filled(rows, collate.most)

    def scores(some: list[Row]) -> torch.Tensor:
        inputs = TokenTrainer.read(SimpleNamespace(reads_mask=True), collate(some))
        inputs.pop("labels")
        with torch.no_grad():
            return model(**inputs).logits[0]

    before = scores(line)
    begin = 0
    for number, row in enumerate(line):
        end = begin + len(row["labels"])
        other = [{**each, "input_ids": list(each["input_ids"])} for each in line]
        other[number]["input_ids"] = [3 + (i - 2) % 37 for i in row["input_ids"]]
        after = scores(other)
        assert not torch.allclose(before[begin:end], after[begin:end], atol=1e-3)
        rest = torch.cat([before[:begin] - after[:begin], before[end:] - after[end:]])
        assert float(rest.abs().max()) <= 1e-6
        begin = end
