"""Packed rows: the same loss of every token as alone; and micro-batches by tokens."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forkedruns import LENGTH, Plan
from tests.support.sentences import sentence
from workbench.base.errors import ConfigError
from workbench.finetune.data.training.rows import Row
from workbench.finetune.data.training.tokens import TokenRows, packed, shuffled
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.methods.registry import method_of
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


def test_micro_batches_by_tokens_hold_every_row_once_in_an_order_of_the_seed(
    tmp_path: Path,
) -> None:
    made = TokenRows(rows(), tmp_path)
    by_seed = [list(packed(shuffled(made, 14, seed), 14)) for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    for batches in by_seed:
        assert max(len(batch["input_ids"]) for batch in batches) <= 14
        every = [token for batch in batches for token in batch["input_ids"]]
        assert sorted(every) == sorted(token for row in rows() for token in row["input_ids"])
    assert TokenRows(by_seed[0], tmp_path).samples == len(rows())
    with pytest.raises(
        ConfigError, match=sentence("tokens_per_micro_batch is {}, and a row has {} tokens", 11, 12)
    ):
        list(shuffled(made, 11, 0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"per_device_train_batch_size": 8}, "leave per_device_train_batch_size out"),
        ({"per_device_train_batch_size": 1, "packing": True}, "drop packing"),
        ({"per_device_train_batch_size": 1, "max_source_length": 513}, "use 513 or more"),
        ({"per_device_train_batch_size": 1, "model": "tiny-t5"}, "is for causal models"),
    ],
)
def test_a_number_of_tokens_beside_other_limits_of_a_batch_is_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        FineTune(**{"model": "tiny-llama", "tokens_per_micro_batch": 512, **options})


def test_the_plan_counts_the_tokens_of_a_micro_batch() -> None:
    job = FineTune(model="tiny-llama", tokens_per_micro_batch=5000)
    assert method_of("sft").learns_at_once(job) == (4872, 128)


def test_a_number_of_tokens_alone_sets_one_packed_row() -> None:
    job = FineTune(model="tiny-llama", tokens_per_micro_batch=512)
    assert job.per_device_train_batch_size == 1
    assert FineTune(model="tiny-llama").replace(tokens_per_micro_batch=512) == job
    assert FineTune.from_dict(job.to_dict()) == job


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("packs", ["packing", "tokens"])
def test_ranks_train_on_packed_rows_as_one_process_does_and_count_the_rows_in_them(
    tmp_path: Path, packs: str
) -> None:
    plan = Plan(tmp_path)
    by_tokens = packs == "tokens"
    how = {
        "model": "tiny-llama",
        **({"tokens_per_micro_batch": 200} if by_tokens else {"packing": True}),
        "max_steps": 3,
        "profile_step": 0,
        "max_source_length": 128,
        **LENGTH,
    }
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    for technique, ranks in (("single", 1), ("zero3", 2)):
        batch = dict(zip(names, (1, 4 // ranks) if by_tokens else (4 // ranks, 1), strict=True))
        plan.add(technique, ranks, technique=technique, **batch, **how)
    ran = plan.run(timeout_s=500)
    single, zero3 = ran["single"], ran["zero3"]
    assert set(single.exit_codes.values()) | set(zero3.exit_codes.values()) == {0}, (
        single.stderr() + zero3.stderr()
    )
    assert zero3.curve("loss") == pytest.approx(single.curve("loss"), rel=1e-3)
    (end,) = single.data("end")
    rows = float(str(end["train_samples_per_s"])) * float(str(end["train_runtime_s"]))
    assert rows > 2 * 3 * 4  # a row holds more than two texts
