"""Packed rows: the same loss of every token as alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forkedruns import LENGTH, Plan
from workbench.finetune.data.training.rows import Row
from workbench.finetune.data.training.tokens import packed
from workbench.finetune.model import tiny
from workbench.finetune.recipe.lean_loss import shifted
from workbench.finetune.recipe.order import IGNORED, pad

COLLATOR = partial(pad, pad_id=0)


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(3, 40, (length,), generator=generator).tolist()
        for length in (5, 9, 3, 1, 12, 7, 2)
    ]
    return [{"input_ids": each, "labels": [IGNORED, *each[1:]]} for each in ids]


def llama(attention: str) -> Any:
    model = tiny.make("tiny-llama", range(40), seed=0)
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    return model.eval()


def token_losses(model: Any, batch: dict[str, torch.Tensor]) -> list[float]:
    """The loss of each learned token, in the order of the texts."""
    labels = batch.pop("labels")
    if "position_ids" in batch:
        del batch["attention_mask"]
    logits = model(**batch).logits
    targets = shifted(labels, True)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    return [
        float(loss)
        for loss, target in zip(losses, targets.flatten(), strict=True)
        if target != IGNORED
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_token_of_a_packed_row_has_the_loss_that_it_has_alone(attention: str) -> None:
    model = llama(attention)
    together = list(packed(rows(), 20))
    assert [len(row["input_ids"]) for row in together] == [18, 19, 2]
    with torch.no_grad():
        alone = [loss for row in rows() for loss in token_losses(model, COLLATOR([row]))]
        losses = token_losses(model, COLLATOR(together))
    assert len(losses) == sum(len(row["labels"]) - 1 for row in rows())
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_ranks_train_on_packed_rows_as_one_process_does_and_count_the_rows_in_them(
    tmp_path: Path,
) -> None:
    plan = Plan(tmp_path)
    how = {
        "model": "tiny-llama",
        "packing": True,
        "max_steps": 3,
        "profile_step": 0,
        "max_source_length": 128,
        **LENGTH,
    }
    plan.add("single", 1, technique="single", per_device_train_batch_size=4, **how)
    plan.add("zero3", 2, technique="zero3", per_device_train_batch_size=2, **how)
    ran = plan.run(timeout_s=500)
    single, zero3 = ran["single"], ran["zero3"]
    assert set(single.exit_codes.values()) | set(zero3.exit_codes.values()) == {0}, (
        single.stderr() + zero3.stderr()
    )
    assert zero3.curve("loss") == pytest.approx(single.curve("loss"), rel=1e-3)
    (end,) = single.data("end")
    rows = float(str(end["train_samples_per_s"])) * float(str(end["train_runtime_s"]))
    assert rows > 2 * 3 * 4  # a row holds more than two texts
