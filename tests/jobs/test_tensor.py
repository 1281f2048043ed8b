"""`tensor_parallel`: refused where ranks cannot share weights, counted in batches and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workbench.base.errors import ConfigError
from workbench.finetune.job.deepspeed_config import resolve
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model import outline
from workbench.finetune.options.refusals.tensor import check_pod, check_tensor_model
from workbench.finetune.plan.memory import host_of, need_of
from workbench.finetune.plan.setting import setting_of
from workbench.finetune.submit.prepare import check_early
from workbench.finetune.submit.resume import bound_to_ranks
from workbench.finetune.techniques.sizes import Moment, Parameters, Trace

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
}


def job(**options: Any) -> FineTune:
    return FineTune(**{"model": "tiny-llama", "tensor_parallel": 2, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"technique": "single"}, "ranks of technique 'single' train alone; use 'ddp', 'zero1'"),
        ({"technique": "local-sgd"}, "ranks of technique 'local-sgd' train alone"),
        ({"technique": "zero3"}, "'zero3' shards the weights already; drop tensor_parallel"),
        ({"technique": "zero3-offload"}, "'zero3-offload' shards the weights already"),
        ({"technique": "fsdp"}, "'fsdp' shards the weights already"),
        ({"sequence_parallel": 2}, "works without sequence_parallel; drop"),
        ({"torch_compile": True}, "works without torch_compile; drop"),
        ({"precision": "fp16"}, "without precision 'fp16'; use 'bf16'"),
        ({"peft": "qlora"}, "no weights in 4 bits; use peft='lora'"),
        ({"peft": "lora", "lora": {"use_dora": True}}, "without lora use_dora; drop"),
        ({"peft": "lora", "lora": {"bias": "all"}}, "without lora bias; drop"),
        ({"peft": "lora", "lora": {"modules_to_save": ["lm_head"]}}, "lora modules_to_save; drop"),
        ({"method": "dpo"}, "for method 'sft', and method is 'dpo'; drop tensor_parallel"),
        ({"model": "tiny-t5"}, "'tiny-t5' is an encoder-decoder model; drop tensor_parallel"),
        ({"model": "tiny-t5", "tensor_parallel": 1}, ""),
        ({"peft": "lora", "lora": {"bias": "none"}, "packing": True}, ""),
    ],
)
def test_options_that_exclude_shared_weights_are_refused(
    options: dict[str, Any], says: str
) -> None:
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
        ({"intermediate_size": 190}, 4, "intermediate_size of the model is 190"),
        ({"num_local_experts": 4}, 2, "mixtures of experts; use 'zero3' or 'fsdp'"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_the_start(
    config: dict[str, Any], size: int, says: str, tmp_path: Path
) -> None:
    if not says:
        check_tensor_model(job(tensor_parallel=size), {**LLAMA, **config})
        return
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    with pytest.raises(ConfigError, match=says):
        resolve(job(model=str(tmp_path), tensor_parallel=size), gpus=0, world_size=size)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("gpt2", "no plan to cut the layers of a 'gpt2'. Drop tensor_parallel"),
        # All its layers have whole inputs and outputs.
        ("phi3", "no plan to cut the layers of a 'phi3'"),
        ("llama", ""),
    ],
)
def test_a_model_whose_plan_cuts_nothing_is_refused_before_the_start(kind: str, says: str) -> None:
    config = {**LLAMA, "model_type": kind, "pad_token_id": 0}
    answer = outline.answer(
        {
            "folder": "m",
            "config": config,
            "generation": {},
            "scores": False,
            "tensor_parallel": True,
        }
    )
    assert says in answer.get("refused", "")
    assert bool(says) == bool(answer)


def test_a_group_lies_within_a_pod() -> None:
    check_pod(job(), 4)
    with pytest.raises(ConfigError, match=r"a pod has 3 ranks.*use a number that divides 3"):
        check_pod(job(), 3)
    with pytest.raises(ConfigError, match=r"a pod has one rank.*a multiple of 2 GPUs"):
        check_early(job(), gpus=0)
    with pytest.raises(ConfigError, match="a pod has one rank"):
        setting_of(job(), pods=2, gpus=1)
    assert resolve(job(), gpus=2, world_size=4) is not None
    with pytest.raises(ConfigError, match="3 ranks form no groups of 2; use a multiple of 2"):
        resolve(job(), gpus=2, world_size=3)


def test_a_batch_counts_the_rows_of_groups() -> None:
    shared = job(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert shared.global_batch(4) == 24
    assert shared.batch_on(4).factors == (4, 3, 2)
    assert shared.on_ranks(2, 4).global_batch(2) == 24


def test_deepspeed_exchanges_gradients_in_groups_and_its_own_key_names_the_option() -> None:
    config = resolve(job(), gpus=2, world_size=4)
    assert config is not None and config["tensor_parallel"] == {"autotp_size": 2}
    whole = resolve(job(tensor_parallel=1), gpus=2, world_size=4)
    assert whole is not None and "tensor_parallel" not in whole
    own = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ConfigError, match=r"use FineTune\(tensor_parallel=N\)"):
        resolve(job(tensor_parallel=1, deepspeed=own), gpus=2, world_size=4)


def test_a_checkpoint_is_for_the_same_number_of_ranks() -> None:
    assert "tensor_parallel" in bound_to_ranks(job(technique="ddp"), {})
    assert not bound_to_ranks(job(technique="ddp", tensor_parallel=1), {})


@pytest.mark.parametrize(("technique", "owners"), [("ddp", 1), ("zero1", 4), ("zero2", 4)])
def test_the_plan_counts_the_part_of_a_rank(technique: str, owners: int) -> None:
    layer = Parameters(
        frozen=0, trained=10**9, packed=0, largest=10**8, largest_packed=0, small={10**8: 10}
    )
    rest = Parameters(
        frozen=0, trained=4 * 10**8, packed=0, largest=2 * 10**8, largest_packed=0, small={}
    )
    moment = Moment(base=0.0, row=10.0, logits=0.0, logits_row=0.0, gradients=1.4e9)
    trace = Trace(moments={"fp32": [moment]}, layers=[layer], rest=rest)
    shared = job(technique=technique, precision="fp32")
    settings = [
        setting_of(each, pods=2, gpus=4) for each in (shared.replace(tensor_parallel=1), shared)
    ]
    assert settings[1].shards == owners
    whole, part = (need_of(setting, trace, 1).gpu for setting in settings)
    assert whole is not None and part is not None
    # Half of the layers, and all of the rest.
    share = 9 / 14
    assert part.parameters == pytest.approx(share * whole.parameters)
    share *= settings[0].shards / owners
    assert part.gradients == pytest.approx(share * whole.gradients)
    assert part.optimizer == pytest.approx(share * whole.optimizer)
    # Every rank reads the whole model.
    loading = [
        host_of(setting, trace, need_of(setting, trace, 1), None)["loading"].total
        for setting in settings
    ]
    assert loading[0] == loading[1]
