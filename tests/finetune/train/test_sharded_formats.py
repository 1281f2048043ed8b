"""Formats of the activations that FSDP keeps, as the planner counts them. No other process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from workbench import FineTune
from workbench.finetune.model.layers import with_lora
from workbench.finetune.model.sharding import parts_to_shard
from workbench.finetune.options.adapters import Lora
from workbench.finetune.techniques.on_pods.sharding import shard_model

pytestmark = pytest.mark.slow

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kept_tensors(layers: int, peft: str, precision: str) -> Counter[tuple[Any, ...]]:
    """Return shapes and formats of the tensors that a forward pass keeps, with their number."""
    config = AutoConfig.for_model("llama", **SHAPE, num_hidden_layers=layers, use_cache=False)
    model = AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable()
    if peft == "lora":
        model = with_lora(model, Lora(r=4), checkpointing=True)
    job = FineTune(
        model="tiny-llama",
        technique="fsdp",
        peft=peft,
        precision=precision,
        gradient_checkpointing=True,
    )
    shard_model(model, job, gpus=0, parts=parts_to_shard)
    kept: Counter[tuple[Any, ...]] = Counter()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tuple(tensor.shape), tensor.dtype] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(2, 7, dtype=torch.long))
    return kept


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("peft", ["none", "lora"])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_a_recomputed_layer_keeps_its_input_alone_in_the_format_of_the_arithmetic(
    peft: str, precision: str, dtype: torch.dtype
) -> None:
    few, many = kept_tensors(2, peft, precision), kept_tensors(5, peft, precision)
    assert many - few == Counter({((2, 7, 32), dtype): 3})
    assert not few - many
