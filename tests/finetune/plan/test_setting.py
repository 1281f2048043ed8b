"""Numbers of a job that decide its memory, and the request of its traced step."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from workbench import FineTune
from workbench.finetune.plan.setting import request_of, setting_of
from workbench.finetune.techniques.sizes import Setting

GPU_JOB = {"model": "tiny-llama", "technique": "ddp"}
LORA = {"peft": "lora"}
BF16 = {"precision": "bf16"}
SPREAD = {"technique": "single", "device_map": "auto"}


def setting(
    gpus: int = 4, ranks: int = 0, model: dict[str, object] | None = None, **options: Any
) -> Setting:
    job = FineTune(**{**GPU_JOB, **options})
    return setting_of(job, pods=2, gpus=gpus, ranks=ranks, model=model)


def request(gpus: int = 2, lengths: tuple[int, int] = (16, 8), **options: Any) -> dict[str, Any]:
    job = FineTune(**{**GPU_JOB, **options})
    return request_of(job, {"layers": 2}, ["fp32"], gpus=gpus, lengths=lengths)


def test_a_plain_job_trains_fp32_weights_of_fp32_files_with_adamw() -> None:
    assert setting() == Setting(
        technique="ddp",
        ranks=8,
        shards=1,
        on_pod=4,
        gpu=True,
        arithmetic="fp32",
        packed=False,
        state_bytes=8.0,
        paged=False,
        accumulates=False,
    )


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        # Trained weights stay in FP32. Only weights that are not trained become half as large.
        (BF16, {"arithmetic": "autocast-bf16"}),
        (LORA, {}),
        ({**LORA, **BF16}, {"arithmetic": "autocast-bf16", "frozen_bytes": 2}),
        ({"peft": "qlora", "precision": "fp32"}, {"packed": True}),
        (
            {"peft": "qlora", **BF16},
            {
                "arithmetic": "autocast-bf16",
                "frozen_bytes": 2,
                "compute_bytes": 2,
                "packed": True,
            },
        ),
        ({"gradient_accumulation_steps": 2}, {"accumulates": True}),
        ({"optimizer": "lion"}, {"state_bytes": 4.0, "update_bytes": 4.0, "updates_apart": True}),
        ({"technique": "zero1", "tensor_parallel": 2}, {"sharers": 2, "shards": 4}),
    ],
)
def test_an_option_changes_only_its_own_numbers(
    options: dict[str, object], changed: dict[str, object]
) -> None:
    technique = options.get("technique", "ddp")
    before = asdict(setting(technique=technique))
    after = asdict(setting(**options))
    assert {name: after[name] for name in after if after[name] != before[name]} == changed


def test_a_pod_without_gpus_has_one_rank_on_its_cpu() -> None:
    without = setting(gpus=0)
    assert (without.ranks, without.on_pod, without.gpu) == (2, 1, False)
    one = setting(gpus=1)
    assert (one.ranks, one.on_pod, one.gpu) == (2, 1, True)
    several = setting(gpus=0, ranks=3)
    assert (several.ranks, several.on_pod, several.gpu) == (6, 3, False)
    # `single` leaves the other GPUs, ranks and pods idle.
    assert setting(gpus=0, ranks=3, technique="single").ranks == 1
    alone = setting(gpus=4, technique="single")
    assert (alone.ranks, alone.on_pod, alone.gpu) == (1, 1, True)


@pytest.mark.parametrize(
    ("options", "gpus", "spread"),
    [(SPREAD, 2, True), (SPREAD, 1, False), ({"technique": "single"}, 2, False)],
)
def test_layers_are_spread_over_several_gpus_if_the_job_asks_for_it(
    options: dict[str, Any], gpus: int, spread: bool
) -> None:
    assert setting(gpus=gpus, **options).spread is spread
    assert ("spread" in request(gpus=gpus, **options)) is spread


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (None, 4),
        ({"dtype": "float32"}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"torch_dtype": "torch.float16"}, 2),
        ({"dtype": None, "torch_dtype": "float16"}, 2),
    ],
)
def test_a_weight_in_the_files_has_the_size_of_the_models_format(
    model: dict[str, object] | None, size: int
) -> None:
    assert setting(model=model).file_bytes == size


def test_rows_are_padded_to_multiples_of_8_as_the_trainer_pads_them() -> None:
    for lengths, padded in (((16, 8), (16, 8)), ((17, 9), (24, 16)), ((7, 1), (8, 8))):
        asked = request(lengths=lengths)
        assert (asked["source"], asked["target"]) == padded


def test_a_rank_traces_its_part_of_a_row_that_several_ranks_share() -> None:
    asked = request(lengths=(34, 20), technique="zero3", sequence_parallel=2)
    # 17 and 10 tokens, padded.
    assert (asked["source"], asked["target"]) == (24, 16)


def test_a_request_without_lengths_has_the_longest_rows_of_the_job() -> None:
    job = FineTune(max_source_length=64, max_target_length=32)
    asked = request_of(job, {}, ["fp32"], gpus=0, lengths=None)
    assert (asked["source"], asked["target"]) == (64, 32)


def test_a_request_names_each_option_that_changes_the_traced_step() -> None:
    plain = request(gpus=0)
    assert plain == {
        "config": {"layers": 2},
        "source": 16,
        "target": 8,
        "arithmetic": ["fp32"],
        "checkpointing": False,
        "lora": None,
        "gpu": False,
    }
    options: tuple[tuple[dict[str, Any], dict[str, object]], ...] = (
        ({"gpus": 1}, {"gpu": True}),
        (
            {"gradient_checkpointing": True, "checkpoint_layers": ["LlamaMLP"]},
            {"checkpointing": True, "checkpoint_layers": ["LlamaMLP"]},
        ),
        (
            {"gradient_checkpointing": True, "checkpoint_policy": "matmuls"},
            {"checkpointing": True, "checkpoint_policy": "matmuls"},
        ),
        ({"method": "reward"}, {"scores": True}),
    )
    for changed, named in options:
        assert request(**{"gpus": 0, **changed}) == {**plain, **named}
    lora = request(gpus=0, peft="lora", lora={"r": 3})["lora"]
    assert lora["r"] == 3 and "resume_from" not in lora


def test_the_loss_of_a_mixture_of_experts_is_in_the_request() -> None:
    asked = request(model="mixtral-8x7b", router_aux_loss_coef=0.25)
    assert asked["router_aux_loss_coef"] == 0.25


def test_layers_are_spread_within_the_given_memory_else_without_a_limit() -> None:
    given = request(**SPREAD, max_memory={"0": 1.5, "1": 2}, peft="qlora", **BF16)["spread"]
    assert given == {
        "limits": {"0": 3 * 2**29, "1": 2 * 2**30},
        "packed": True,
        "format": "bf16",
    }
    free = request(**SPREAD)["spread"]
    assert free["packed"] is False and list(free["limits"]) == ["0", "1"]
    assert min(free["limits"].values()) > 2**50
