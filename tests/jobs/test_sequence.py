"""`sequence_parallel`: refused where ranks cannot share rows, counted in batches and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.options.refusals.sequence import check_sequence_model
from workbench.finetune.plan.setting import request_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
}


def job(**options: Any) -> FineTune:
    return FineTune(**{"model": "tiny-llama", "sequence_parallel": 2, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"technique": "single"}, "ranks of technique 'single' train alone; use 'ddp'"),
        ({"technique": "local-sgd"}, "ranks of technique 'local-sgd' train alone"),
        ({"packing": True}, "works without packing"),
        (
            {"tokens_per_micro_batch": 512, "per_device_train_batch_size": 1},
            "works without tokens_per_micro_batch",
        ),
        ({"torch_compile": True}, "works without torch_compile"),
        ({"attn_implementation": "eager"}, "'sdpa' or 'flash_attention_2', not 'eager'"),
        ({"model": "tiny-t5"}, "'tiny-t5' is an encoder-decoder model"),
        ({"model": "tiny-t5", "sequence_parallel": 1}, ""),
    ],
)
def test_options_that_exclude_shared_rows_are_refused(options: dict[str, Any], says: str) -> None:
    if not says:
        job(**options)
        return
    with pytest.raises(ConfigError, match=says):
        job(**options)


@pytest.mark.parametrize(
    ("config", "size", "says"),
    [
        ({}, 4, ""),
        ({}, 8, "the model has 4 key and value heads; use a number that divides 4"),
        ({}, 3, "the model has 8 attention heads"),
        ({"sliding_window": 128}, 2, "full attention.*sliding_attention"),
        ({"sliding_window": 128, "use_sliding_window": False}, 2, ""),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 2, "sliding_attention"),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 128}, 2, ""),
        ({"num_local_experts": 4}, 2, "mixtures of experts"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_the_start(
    config: dict[str, Any], size: int, says: str, tmp_path: Path
) -> None:
    if not says:
        check_sequence_model(job(sequence_parallel=size), {**LLAMA, **config})
        return
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    with pytest.raises(ConfigError, match=says):
        resolve(job(model=str(tmp_path), sequence_parallel=size), gpus=0, world_size=size)


def test_ranks_form_groups() -> None:
    assert resolve(job(), gpus=0, world_size=4) is not None
    with pytest.raises(ConfigError, match="3 ranks form no groups of 2; use a multiple of 2"):
        resolve(job(), gpus=0, world_size=3)


def test_a_batch_counts_the_rows_of_groups() -> None:
    shared = job(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert shared.global_batch(4) == 24
    assert shared.batch_on(4).factors == (4, 3, 2)
    assert shared.on_ranks(2, 4).global_batch(2) == 24
    # DeepSpeed counts ranks.
    config: dict[str, object] = {"zero_optimization": {"stage": 1}, "train_batch_size": 48}
    assert resolve(shared.replace(deepspeed=config), gpus=0, world_size=4) is not None
    config["train_batch_size"] = 24
    with pytest.raises(ConfigError, match="train_batch_size is 24"):
        resolve(shared.replace(deepspeed=config), gpus=0, world_size=4)


def test_the_plan_traces_the_part_of_a_rank() -> None:
    whole = job(sequence_parallel=1, max_source_length=4000, max_target_length=96)
    sizes = [
        request_of(each, LLAMA, ["fp32"], gpus=0, lengths=None)
        for each in (whole, whole.replace(sequence_parallel=2))
    ]
    assert [(size["source"], size["target"]) for size in sizes] == [(4000, 96), (2000, 48)]
