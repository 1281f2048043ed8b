"""Linear layers in FP8, emulated on CPUs: the numbers of torchao itself, under every technique."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.forkedruns import Plan, Ran
from tests.support.refusals import check_on
from tests.support.sentences import sentence
from workbench import FineTune
from workbench.base.errors import ConfigError
from workbench.finetune.model.layers import use_float8

STEPS = 5
COMMON: dict[str, Any] = {"max_steps": STEPS, "predict_rows": 0, "profile_step": 5}
RANKS = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2}


def llama() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=128, num_attention_heads=4, num_key_value_heads=2, **size)
    return LlamaForCausalLM(config)


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 128, (4, 23), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def test_losses_are_those_of_torchao_by_hand_and_near_those_in_fp32() -> None:
    ours = llama()
    by_hand, plain = deepcopy(ours), deepcopy(ours)
    use_float8(ours, gpus=0)
    convert_to_float8_training(
        by_hand,
        config=Float8LinearConfig(emulate=True, pad_inner_dim=True),
        module_filter_fn=lambda _layer, name: name != "lm_head",
    )
    kinds = {name: type(layer) for name, layer in ours.named_modules()}
    assert kinds["lm_head"] is nn.Linear
    assert list(kinds.values()).count(Float8Linear) == 2 * 7
    assert kinds == {name: type(layer) for name, layer in by_hand.named_modules()}
    found = losses(ours)
    assert found == losses(by_hand)
    in_fp32 = losses(plain)
    assert found != in_fp32
    assert found == pytest.approx(in_fp32, rel=0.05)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    plan = Plan(tmp_path_factory.mktemp("float8"))
    rows = {1: {"per_device_train_batch_size": 8}, 2: {"per_device_train_batch_size": 4}}
    for family in ("llama", "t5"):
        for technique, ranks in RANKS.items():
            options = {**COMMON, **rows[ranks], "technique": technique, "model": f"tiny-{family}"}
            plan.add(f"{family}-{technique}", ranks, float8=True, **options)
        whole = {**COMMON, **rows[1], "technique": "single", "model": f"tiny-{family}"}
        plan.add(f"{family}-fp32", 1, **whole)
    return plan.run()


@pytest.mark.slow
@pytest.mark.parametrize("technique", RANKS)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_every_technique_follows_single_and_fp32(
    ran: dict[str, Ran], family: str, technique: str
) -> None:
    run, single, whole = (ran[f"{family}-{name}"] for name in (technique, "single", "fp32"))
    assert set(run.exit_codes.values()) == {0}, run.stderr()
    assert run.curve("loss") != whole.curve("loss")
    # A tensor's scale is that of its rank's rows.
    assert run.curve("loss") == pytest.approx(single.curve("loss"), rel=0.005)
    assert run.curve("loss") == pytest.approx(whole.curve("loss"), rel=0.03)
    assert not run.data("profile"), "the profiler sees no product of torchao"


def test_a_pod_without_torchao_or_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=sentence("this GPU has {}; drop float8", "8.0")):
        use_float8(llama(), gpus=1)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=sentence("float8 needs the package torchao")):
        use_float8(llama(), gpus=0)


def test_a_model_without_fitting_layers_is_refused() -> None:
    size = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=5, **size))
    with pytest.raises(ConfigError, match=sentence("sizes are multiples of", 16)):
        use_float8(model, gpus=0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"peft": "lora"}, "peft"),
        ({"tensor_parallel": 2, "technique": "ddp"}, "tensor_parallel"),
        ({"training": {"use_liger_kernel": True}}, "use_liger_kernel"),
        ({"precision": "fp16"}, "precision 'fp16'"),
        ({"method": "dpo"}, "method 'dpo'"),
    ],
)
def test_options_that_exclude_float8_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=sentence("{} works without {}; drop {}", "float8", name)):
        FineTune(model="tiny-llama", float8=True, **options)


def test_cpus_emulate_in_fp32_alone() -> None:
    job = FineTune(model="tiny-llama", float8=True, precision="bf16")
    with pytest.raises(ConfigError, match=sentence("float8 is emulated in fp32 on CPUs")):
        check_on(job, gpus=0)
    check_on(job, gpus=1)
