"""Settings that a job has on GPUs. No GPU is used: what is set, and that losses stay, is tested."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import leave_casts_to_autocast
from workbench.finetune.techniques.on_pods.sharding import shard_model
from workbench.finetune.techniques.registry import technique_of
from workbench.finetune.train.attention import choice, use_attention
from workbench.finetune.train.settings import grow_segments

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))


ONE_ROW = {"per_device_train_batch_size": 1}
IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize(
    ("use_cpu", "fsdp", "fused"),
    [(False, {}, True), (False, {"offload": True}, False), (True, {}, False)],
)
def test_adamw_is_fused_under_fsdp_where_the_update_is_on_a_gpu(
    use_cpu: bool, fsdp: dict[str, object], fused: bool
) -> None:
    job = FineTune(technique="fsdp", fsdp=fsdp)
    given = {"optim": "adamw_torch_fused", "use_cpu": use_cpu}
    options = technique_of("fsdp").training_options(job, given)
    assert options["optim"] == ("adamw_torch_fused" if fused else "adamw_torch")


@pytest.mark.usefixtures("one_rank")
def test_the_fused_update_of_shards_is_that_of_the_plain_loop() -> None:
    weights = {}
    for fused in (True, False):
        model = llama()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused, foreach=False)
        for _ in range(4):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[fused] = [each.to_local().detach() for each in model.parameters()]
    for got, expected in zip(weights[True], weights[False], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_fsdp_compiles_each_layer_and_losses_and_names_stay() -> None:
    losses, names = {}, {}
    for compiles in (True, False):
        model = llama()
        job = FineTune(
            model="tiny-llama",
            technique="fsdp",
            torch_compile=compiles,
            training={"torch_compile_backend": "aot_eager"} if compiles else {},
        )
        compiled = torch._dynamo.utils.counters["frames"]["ok"]
        shard_model(model, job, gpus=0, parts=lambda model, _: list(model.model.layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        losses[compiles] = []
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiles].append(float(loss.detach()))
        names[compiles] = list(model.state_dict())
        assert (torch._dynamo.utils.counters["frames"]["ok"] > compiled) == compiles
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)
    assert losses[True][-1] < losses[True][0]
    assert names[True] == names[False]


@pytest.mark.parametrize(
    ("variable", "asked"),
    [
        (None, ["expandable_segments:True"]),
        ("PYTORCH_ALLOC_CONF", []),
        ("PYTORCH_CUDA_ALLOC_CONF", []),
    ],
)
def test_blocks_grow_unless_the_user_has_set_the_allocator(
    variable: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    given: list[str] = []
    torch._C._accelerator_setAllocatorSettings("")  # torch has the function
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    grow_segments()
    assert given == asked


class Casts(TorchDispatchMode):
    """Count the conversions to another number format, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_adapters_take_their_inputs_as_autocast_has_them_with_equal_losses() -> None:
    from peft import get_peft_model

    counts, losses = {}, {}
    for leaves in (True, False):
        model = llama().to(torch.bfloat16)
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
        trained = [each for each in adapted.parameters() if each.requires_grad]
        for weight in trained:
            weight.data = weight.data.float()
            nn.init.normal_(weight, std=0.1)
        if leaves:
            leave_casts_to_autocast(adapted)
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses[leaves] = []
        for _ in range(4):
            with Casts() as casts, torch.autocast("cpu", dtype=torch.bfloat16):
                loss = adapted(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[leaves].append(float(loss.detach()))
        counts[leaves] = casts.count
    assert losses[True] == losses[False]
    assert losses[True][-1] < losses[True][0]
    # Without the option, the input of each of the 14 layers is converted twice.
    assert counts[True] <= counts[False] - 14


def test_zero3_gathers_the_experts_of_a_layer_together() -> None:
    from deepspeed.utils import get_z3_leaf_modules
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        SwitchTransformersConfig,
        SwitchTransformersForConditionalGeneration,
    )

    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "vocab_size": 32}
    switch = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=2,
            num_experts=4,
            **sizes,
        )
    )
    job = FineTune(technique="zero3")
    technique_of("zero3").wrap(switch, job, gpus=0, parts=lambda *_: [])
    leaves = get_z3_leaf_modules(switch)
    assert {type(leaf).__name__ for leaf in leaves} == {"SwitchTransformersExperts"}
    assert all(len(list(leaf.children())) == 4 for leaf in leaves)
    # The experts of Mixtral are stacked in one module.
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=32,
    )
    mixtral = MixtralForCausalLM(config)
    technique_of("zero3").wrap(mixtral, job, gpus=0, parts=lambda *_: [])
    assert get_z3_leaf_modules(mixtral) == []


@pytest.mark.parametrize(
    ("supports", "job", "flash", "chosen"),
    [
        ((True, True), {}, True, "flash_attention_2"),
        ((True, True), {}, False, "sdpa"),
        ((False, True), {}, True, "sdpa"),
        ((True, True), {"precision": "fp32"}, True, "sdpa"),
        (
            (True, True),
            {"packing": True, "per_device_train_batch_size": 1},
            True,
            "flash_attention_2",
        ),
        ((True, True), {"packing": True}, True, "flash_attention_2"),
        ((True, True), {"packing": True}, False, "flex_attention"),
        ((True, False), {"packing": True}, False, "sdpa"),
        ((True, True), {"sequence_parallel": 2, "technique": "ddp"}, True, "sdpa"),
    ],
)
def test_an_open_attention_is_chosen_by_the_pod_the_model_and_the_rows(
    supports: tuple[bool, bool], job: dict[str, Any], flash: bool, chosen: str
) -> None:
    flash_too, flex_too = supports
    model = SimpleNamespace(
        config=SimpleNamespace(_attn_implementation="sdpa"),
        _supports_flash_attn=flash_too,
        _supports_flex_attn=flex_too,
    )
    asked = FineTune(**{"model": "tiny-llama", "precision": "bf16", **job})
    assert choice(model, asked, flash=flash) == chosen
    model.config._attn_implementation = "eager"  # the maker's choice
    assert choice(model, asked, flash=flash) == "eager"


def test_a_cpu_keeps_its_attention_and_what_a_pod_lacks_is_named() -> None:
    model = llama()
    assert use_attention(model, FineTune(model="tiny-llama", packing=True), gpus=0) == ""
    assert model.config._attn_implementation == "sdpa"
    for name, package in (
        ("flash_attention_2", "flash-attn"),
        ("flash_attention_3", "flash-attn-3"),
    ):
        job = FineTune(model="tiny-llama", precision="bf16", attn_implementation=name)
        with pytest.raises(ConfigError, match=f"needs the package {package}, which this pod lacks"):
            use_attention(model, job, gpus=1)
