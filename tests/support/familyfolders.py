"""Tiny models of many families of transformers, saved as folders, and their loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import tests.support.tinyfolders as folders

MOE: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DENSE_FIRST: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
HEADS: dict[str, object] = {"head_dim": 8}
BOTH: dict[str, object] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
}
T5: dict[str, object] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
TEXT: dict[str, object] = {**folders.SIZES, "hidden_size": 32, "num_attention_heads": 4}
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
IDS = torch.arange(3, 13).view(1, 10)


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
