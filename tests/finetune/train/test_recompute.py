"""Recomputed layers that keep the outputs of matrix products: equal gradients, fewer products."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from tests.support.refusals import check_on
from workbench.base.errors import ConfigError
from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import check_liger, recompute
from workbench.finetune.plan.trace.trace import trace
from workbench.finetune.recipe.standalone import use_no_cache

LLAMA = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
)
T5 = T5Config(
    vocab_size=100,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
MODELS = {"llama": (LlamaForCausalLM, LLAMA), "t5": (T5ForConditionalGeneration, T5)}


class Operations(TorchDispatchMode):
    """Count the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(name: str, how: Any) -> tuple[float, dict[str, torch.Tensor], Counter[str]]:
    """Return the loss, the gradients and the operations of a backward pass, dropout included."""
    torch.manual_seed(1)
    kind, config = MODELS[name]
    model = kind(config).train()
    use_no_cache(model)
    how(model)
    tokens = torch.randint(2, 100, (2, 12))
    torch.manual_seed(2)
    loss = model(input_ids=tokens, labels=tokens).loss
    with Operations() as counted:
        loss.backward()
    of = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), of, counted.names


@pytest.mark.parametrize("name", MODELS)
def test_kept_products_are_not_computed_again_and_gradients_are_equal(name: str) -> None:
    loss, of, plain = step(name, lambda model: None)
    layers = sorted(MODELS[name][0]._no_split_modules or ())
    recomputed_loss, of_recomputed, recomputed = step(name, lambda model: recompute(model, layers))
    kept_loss, of_kept, kept = step(name, lambda model: recompute(model, (), "matmuls"))
    assert loss == recomputed_loss == kept_loss
    for parameter, gradient in of.items():
        torch.testing.assert_close(of_kept[parameter], gradient, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_recomputed[parameter], gradient, rtol=1e-6, atol=1e-7)
    assert recomputed["aten.mm.default"] > plain["aten.mm.default"]
    assert kept["aten.mm.default"] == plain["aten.mm.default"]
    # The rest of a layer is computed again.
    assert kept["aten.rsqrt.default"] > plain["aten.rsqrt.default"]


def test_plan_counts_what_recomputed_layers_keep() -> None:
    request = {
        "config": {**LLAMA.to_dict(), "num_hidden_layers": 6},
        "source": 64,
        "target": 64,
        "arithmetic": ["fp32"],
        "lora": None,
    }
    of_row = []
    for more in (
        {},
        {"checkpointing": True, "checkpoint_policy": "matmuls"},
        {"checkpointing": True},
    ):
        found = trace({**request, **more})
        of_row.append(max(point[1] for point in found["points"]["fp32"]))
    assert of_row[0] > 1.2 * of_row[1] > 1.2 * 1.2 * of_row[2]


def test_model_that_names_no_layers_is_refused_with_the_remedy() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="checkpoint_layers"):
        recompute(model, (), "matmuls")


def test_liger_s_kernels_are_refused_where_they_would_be_left_out_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    model = LlamaForCausalLM(LLAMA)
    check_liger(model, SimpleNamespace(training={}))
    job = SimpleNamespace(training={"use_liger_kernel": True})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="liger-kernel"):
        check_liger(model, job)
    known = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": print})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", lambda name: known)
    check_liger(model, job)
    with pytest.raises(ConfigError, match="no kernels for a 't5'"):
        check_liger(T5ForConditionalGeneration(T5), job)


POLICY = {"checkpoint_policy": "matmuls"}
LIGER = {"training": {"use_liger_kernel": True}}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (POLICY, "Give gradient_checkpointing=True too"),
        (
            {**POLICY, "gradient_checkpointing": True, "torch_compile": True},
            "Drop an option",
        ),
        (
            {
                **POLICY,
                "gradient_checkpointing": True,
                "training": {"activation_checkpointing_kwargs": {"use_reentrant": False}},
            },
            "Drop checkpoint_policy",
        ),
        ({**LIGER, "model": "tiny-t5"}, "Liger has no kernels for the family of 'tiny-t5'"),
        ({"training": {"liger_kernel_config": {}}}, "all kernels of Liger but its losses"),
    ],
)
def test_options_that_cannot_work_together_are_refused(
    options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        FineTune(**options)


def test_liger_s_kernels_are_refused_on_cpus() -> None:
    job = FineTune(model="tiny-llama", **LIGER)
    check_on(job, gpus=1)
    with pytest.raises(ConfigError, match="'use_liger_kernel' needs GPUs"):
        check_on(job, gpus=0)
