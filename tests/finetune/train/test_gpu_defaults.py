"""Settings that a job has on GPUs. No GPU is used: what is set, and that losses stay, is tested."""

from __future__ import annotations

from collections.abc import Iterator
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

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import leave_casts_to_autocast
from workbench.finetune.techniques.on_pods.sharding import shard_model
from workbench.finetune.techniques.registry import technique_of
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
