"""Families that transformers can build tiny are read, saved and merged as without the package.

The reading under ZeRO-3 has one rank here: what transformers does otherwise there depends on no
number of ranks. FSDP reads as `single` does, and shards afterwards.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

import tests.support.tinyfolders as folders
from workbench.base.errors import ConfigError
from workbench.finetune.model import adapters
from workbench.finetune.model import load as model
from workbench.finetune.model.files import saving
from workbench.finetune.model.layers import with_lora
from workbench.finetune.model.targets import adapted_weights, left_out, linear_weights
from workbench.finetune.options.adapters import Lora
from workbench.finetune.recipe.standalone import without_shm_op

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DENSE_FIRST = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
HEADS = {"head_dim": 8}
BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
TEXT = {**folders.SIZES, "hidden_size": 32, "num_attention_heads": 4}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# Options beside the common sizes, by the name of the family's classes.
CAUSAL: dict[str, dict[str, object]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": HEADS,
    "Gemma": HEADS,
    "Gemma2": {**HEADS, "sliding_window": 8},
    "Phi": {},
    "Phi3": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": {},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {},
    "Olmo2": {},
    "Cohere": {},
    "Granite": {},
    "SmolLM3": {},
    "Mamba": {"state_size": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "FalconMamba": {"state_size": 8},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**MOE, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**MOE, **HEADS},
    "GptOss": {
        **HEADS,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4},
    "Glm4Moe": {**DENSE_FIRST, **HEADS},
    "DeepseekV3": {**DENSE_FIRST, **LATENT},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "Llama4": {
        **HEADS,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1],
        "intermediate_size_mlp": 16,
    },
    "Phimoe": {"num_local_experts": 4},
    "Jamba": {"num_experts": 2, "use_mamba_kernels": False, "attn_layer_offset": 1},
    "Gemma3n": {
        **HEADS,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "sliding_window": 8,
    },
}
TRANSLATORS: dict[str, dict[str, object]] = {
    "T5": T5,
    "SwitchTransformers": {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1},
    "Bart": BOTH,
    "Pegasus": BOTH,
    "Marian": BOTH,
    "M2M100": BOTH,
}
# Models whose code reads the shape of a weight while the model is made.
ONLY_WHOLE = ("pegasus",)
IDS = torch.arange(3, 13).view(1, 10)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    import deepspeed
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    without_shm_op()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        yield
    dist.destroy_process_group()


def folder_of(family: str, folder: Path) -> Path:
    translates = family in TRANSLATORS
    # A language model of a composite family has a configuration of its own.
    text = getattr(transformers, f"{family}TextConfig", None)
    config = text or getattr(transformers, f"{family}Config")
    end = "ForConditionalGeneration" if translates else "ForCausalLM"
    kind = getattr(transformers, f"{family}{'MTModel' if family == 'Marian' else end}", None)
    if family == "GPT2":
        kind = transformers.GPT2LMHeadModel
    options = TRANSLATORS[family] if translates else {**TEXT, **CAUSAL[family]}
    return folders.save(folder, kind, config, options)


def loss_of(one: Any) -> float:
    with torch.no_grad():
        return float(one.eval()(input_ids=IDS, labels=IDS).loss)


def plain(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    return auto.from_pretrained(folder)


def check_zero3(folder: Path, expected: float) -> None:
    """Read and save under ZeRO-3, as a rank does."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    held = HfDeepSpeedConfig(config)
    try:
        if transformers.AutoConfig.from_pretrained(folder).model_type in ONLY_WHOLE:
            with pytest.raises(ConfigError, match=r"with sharded weights .* Use technique 'fsdp'"):
                model.load(str(folder), (), seed=0)
            return
        loaded = model.load(str(folder), (), seed=0)
        saving.save_model(loaded.model, folder / "zero3", read=True)
        with deepspeed.zero.GatheredParameters(list(loaded.model.parameters())):
            values = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    finally:
        del held
    whole = plain(folder)
    mine = dict(whole.named_parameters())
    assert values.keys() == mine.keys()
    assert all(torch.equal(values[name], mine[name]) for name in values)
    assert loss_of(plain(folder / "zero3")) == pytest.approx(expected, rel=1e-5)


def check_adapters(folder: Path) -> None:
    base = plain(folder)
    linear = set(linear_weights(base))
    trained = with_lora(base, Lora(), checkpointing=False)
    # Each linear layer has an adapter, or the run's note names the layer.
    assert adapted_weights(trained) | set(left_out(trained)) == linear
    assert {name.split(".")[-2] for name in left_out(trained)} <= {"out_proj", "dt_proj"}
    assert not left_out(trained) or "Mamba" in str(base)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    learned = loss_of(trained)
    adapters.save(trained, folder / "adapters", base=str(folder), seed=0)
    again = PeftModel.from_pretrained(plain(folder), str(folder / "adapters"))
    assert loss_of(again) == pytest.approx(learned, rel=1e-5)
    one = model.Loaded(model=plain(folder), tokenizer=None, family="causal")
    adapters.merged(folder / "adapters", one).model.save_pretrained(folder / "merged")
    assert loss_of(plain(folder / "merged")) == pytest.approx(learned, rel=1e-4)


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo at the end what DeepSpeed's `zero.Init` changes in torch."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.mark.parametrize("family", [*CAUSAL, *TRANSLATORS])
def test_a_family_is_read_saved_and_merged_as_plain_transformers_does(
    family: str, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path / "model")
    expected = loss_of(plain(folder))
    loaded = model.load(str(folder), (), seed=0)
    assert not loaded.remarks
    assert loss_of(loaded.model) == pytest.approx(expected, rel=1e-5)
    saving.save_model(loaded.model, folder / "again", read=True)
    assert loss_of(plain(folder / "again")) == pytest.approx(expected, rel=1e-5)
    check_zero3(folder, expected)
    check_adapters(folder)


def test_a_t5_with_an_output_layer_of_its_own_keeps_the_layer_under_zero3(tmp_path: Path) -> None:
    folder = folder_of("T5", tmp_path / "model")

    def with_head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "lm_head.weight": torch.randn(state["shared.weight"].shape)}

    folders.change_weights(folder, with_head)
    check_zero3(folder, loss_of(plain(folder)))
