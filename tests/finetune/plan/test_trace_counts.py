"""What a traced step counts: rows, formats, adapters, recomputed layers, spread layers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.sentences import says
from workbench.finetune.plan.trace.trace import prepared_trace, trace
from workbench.finetune.recipe.lean_loss import piece_tokens

pytestmark = pytest.mark.slow  # `make check` traces no model

WORDS = 500
HIDDEN = 32
LLAMA = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
T5 = {
    "model_type": "t5",
    "vocab_size": WORDS,
    "d_model": HIDDEN,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "decoder_start_token_id": 0,
}
# A family with a key of its own for the number of layers.
BLOOM = {
    "model_type": "bloom",
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "n_layer": 5,
    "n_head": 4,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
GEMMA = {
    "model_type": "gemma2",
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "vocab_size": 500,
        "hidden_size": 32,
        "intermediate_size": 88,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}
# Dense layers before mixtures of experts.
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 88,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# A family that names no class of its layers.
PEGASUS = {
    "model_type": "pegasus",
    "vocab_size": 500,
    "d_model": 32,
    "encoder_layers": 5,
    "decoder_layers": 5,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 88,
    "decoder_ffn_dim": 88,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
}
SOURCE, TARGET = 24, 16
LORA = {"r": 4}
Found = Mapping[str, Any]


def request(config: Mapping[str, Any], *arithmetic: str, **more: Any) -> dict[str, Any]:
    sizes = {"source": SOURCE, "target": TARGET}
    return {"config": config, "arithmetic": arithmetic or ("fp32",), "lora": None, **sizes, **more}


def traced(config: Mapping[str, Any], *arithmetic: str, **more: Any) -> Found:
    """Return the trace of a request; several tests read the same."""
    return _traced(json.dumps(request(config, *arithmetic, **more), sort_keys=True))


@functools.cache
def _traced(asked: str) -> Found:
    return trace(json.loads(asked))


def peak(found: Found, arithmetic: str = "fp32", *, rows: int = 40, weight: float = 0) -> float:
    """Return the most bytes of a step with some rows, and some bytes for a gradient."""
    bytes_held = [
        base + rows * row + weight * gradients
        for base, row, _, _, gradients in found["points"][arithmetic]
    ]
    return float(max(bytes_held))


def assert_same_peaks(one: Found, other: Found, arithmetic: str = "fp32") -> None:
    for rows in (0, 1, 40):
        for weight in (0, 4, 100):
            sizes = {"rows": rows, "weight": weight}
            assert peak(one, arithmetic, **sizes) == pytest.approx(
                peak(other, arithmetic, **sizes), rel=1e-9
            )


@pytest.fixture
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo at the end what `prepared_trace` changes in torch and transformers."""
    from transformers.integrations import moe

    monkeypatch.setattr(moe, "_can_use_grouped_mm", moe._can_use_grouped_mm)
    monkeypatch.setattr(torch.nn.functional, "dropout", torch.nn.functional.dropout)


@pytest.mark.parametrize(
    ("config", "arithmetic", "more"),
    [
        (GEMMA, "fp32", {}),
        (PEGASUS, "fp32", {}),
        (BLOOM, "fp32", {}),
        (T5, "autocast-bf16", {"checkpointing": True}),
        (LLAMA, "fp32", {"gpu": True}),
        pytest.param(LLAMA, "bf16", {"checkpointing": True, "lora": LORA}, marks=pytest.mark.long),
        pytest.param(
            GEMMA3, "autocast-bf16", {"checkpointing": True, "lora": LORA}, marks=pytest.mark.long
        ),
        (DEEPSEEK, "bf16", {"checkpointing": True}),
    ],
)
def test_two_shallow_copies_count_as_the_whole_model(
    config: Mapping[str, Any], arithmetic: str, more: Mapping[str, Any]
) -> None:
    shallow, whole = (traced(config, arithmetic, **more, whole=each) for each in (False, True))
    assert shallow["sizes"] == whole["sizes"]
    assert_same_peaks(shallow, whole, arithmetic)


@pytest.mark.parametrize("config", [PEGASUS, BLOOM, T5, GEMMA3, DEEPSEEK])
def test_a_trace_computes_no_first_values_of_weights(
    config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pegasus computes every number of its table of positions in Python: 2 million for the large.
    modules: list[str] = []
    initialize = PreTrainedModel._initialize_weights

    def initialized(self: Any, module: Any, *rest: Any) -> None:
        modules.append(type(module).__name__)
        initialize(self, module, *rest)

    monkeypatch.setattr(PreTrainedModel, "_initialize_weights", initialized)
    trace(request(config, "bf16"))
    assert modules == []


def test_layers_of_two_kinds_count_as_the_whole_model() -> None:
    kinds = 2 * ["sliding_attention"] + 3 * ["full_attention"]
    config = {**GEMMA, "layer_types": kinds}
    shallow, whole = traced(config), traced(config, whole=True)
    # A tensor for each kind of layer is made once; no peak is lower for this reason.
    for rows in (1, 40):
        assert peak(shallow, rows=rows) >= 0.98 * peak(whole, rows=rows)
        assert peak(shallow, rows=rows) <= 1.1 * peak(whole, rows=rows)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_model_of_unlike_layers_is_traced_as_a_whole(place: int) -> None:
    sizes = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [place]}
    config = {**LLAMA, "model_type": "qwen2_moe", "num_key_value_heads": 2, **sizes, **experts}
    found = traced(config, "bf16")
    assert found == traced(config, "bf16", whole=True)
    dense = [sum(size for size, *_ in layer) for layer in found["sizes"]["layers"]]
    # The embeddings have the last gradient, which no operation follows.
    gradients = max(gradients for *_, gradients in found["points"]["bf16"])
    assert gradients == sum(dense) + WORDS * HIDDEN + HIDDEN
    assert dense[place] < min(size for number, size in enumerate(dense) if number != place)


def test_stacks_of_unequal_depth_are_traced_as_a_whole() -> None:
    config = {**T5, "num_decoder_layers": 3}
    found = traced(config)
    assert found == traced(config, whole=True)
    assert len(found["sizes"]["layers"]) == 7
    assert peak(found) < peak(traced(T5))


def test_a_quantised_checkpoint_has_the_shape_of_its_model() -> None:
    quantised = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes"}}
    assert traced(quantised) == traced(LLAMA)


def test_a_size_of_the_model_is_no_number_of_rows() -> None:
    # 10007 is the number of rows of a trace, unless a size is divisible by the number.
    found = traced({**LLAMA, "vocab_size": 10007})
    like = traced({**LLAMA, "vocab_size": 10000})
    assert peak(found, rows=0) == pytest.approx(peak(like, rows=0), rel=0.01)
    assert peak(found) == pytest.approx(peak(like), rel=0.01)


@pytest.mark.parametrize(
    ("config", "tokens"), [(LLAMA, SOURCE + TARGET - 1), (T5, TARGET)], ids=["llama", "t5"]
)
def test_the_scores_of_every_learned_token_are_counted(
    config: Mapping[str, Any], tokens: int
) -> None:
    found = traced(config)
    assert found["row_tokens"] == tokens
    # The scores in FP32 with their gradient
    most = max(of_rows for _, _, _, of_rows, _ in found["points"]["fp32"])
    assert most == 2 * tokens * WORDS * 4
    assert found["piece_rows"] == piece_tokens(WORDS, "cpu") / tokens
    on_gpu = traced(config, gpu=True)
    assert on_gpu["piece_rows"] == piece_tokens(WORDS, "cuda") / tokens


@pytest.mark.parametrize(
    ("config", "more"),
    [(GEMMA, {}), (LLAMA, {"lora": {**LORA, "target_modules": ["lm_head"]}})],
    ids=["capped scores", "adapters of the output layer"],
)
def test_some_models_score_all_tokens_at_once(
    config: Mapping[str, Any], more: Mapping[str, Any]
) -> None:
    found = traced(config, **more)
    assert found["piece_rows"] is None and found["row_tokens"] == SOURCE + TARGET - 1


def test_a_model_that_scores_texts_has_one_number_for_a_text() -> None:
    found = traced(LLAMA, scores=True)
    assert found["sizes"]["rest"][-1] == [HIDDEN, 1, 0, 0]
    assert found["row_tokens"] == 0 and found["piece_rows"] is None
    assert peak(found) < peak(traced(LLAMA))
    assert peak(found) > peak(traced({**LLAMA, "num_hidden_layers": 3}, scores=True))


def test_half_the_bytes_in_a_half_format() -> None:
    found = traced(LLAMA, "fp32", "bf16", "fp16", "autocast-bf16")
    assert list(found["points"]) == ["fp32", "bf16", "fp16", "autocast-bf16"]
    rows = {name: max(row for _, row, *_ in points) for name, points in found["points"].items()}
    for half in ("bf16", "fp16"):
        assert 0.5 * rows["fp32"] < rows[half] < 0.8 * rows["fp32"]
    # Autocast keeps some tensors of a layer in FP32, and a copy of each weight.
    assert rows["bf16"] < rows["autocast-bf16"] < rows["fp32"]
    assert peak(found, "autocast-bf16", rows=0) > 2 * peak(found, "bf16", rows=0)


def test_frozen_weights_have_the_format_of_the_arithmetic() -> None:
    # Autocast copies no frozen weight, as the weights are in bf16 already.
    frozen = peak(traced(LLAMA, "autocast-bf16", lora=LORA), "autocast-bf16", rows=0)
    whole = peak(traced(LLAMA, "autocast-bf16"), "autocast-bf16", rows=0)
    assert frozen < 0.2 * whole


def test_recomputed_layers_hold_less() -> None:
    layers = ["LlamaDecoderLayer"]
    plain = traced(LLAMA)
    recomputed = traced(LLAMA, checkpointing=True)
    matmuls = traced(LLAMA, checkpointing=True, checkpoint_policy="matmuls")
    assert peak(recomputed) < 0.4 * peak(plain)
    assert peak(recomputed) < 0.6 * peak(matmuls) < peak(plain)
    # Layers by name, with and without the option, and of a policy, are recomputed once.
    for more in ({}, {"checkpointing": True}):
        assert traced(LLAMA, checkpoint_layers=layers, **more) == recomputed
    assert traced(LLAMA, checkpoint_policy="matmuls") == matmuls


def test_parameters_are_told_apart() -> None:
    sizes = traced(LLAMA)["sizes"]
    matrices = 4 * [[HIDDEN * HIDDEN, 1, 0, 1]] + 3 * [[HIDDEN * 88, 1, 0, 1]]
    assert sizes["layers"] == 5 * [[*matrices, [HIDDEN, 1, 0, 0], [HIDDEN, 1, 0, 0]]]
    words = [WORDS * HIDDEN, 1, 0, 0]
    assert sizes["rest"] == [words, [HIDDEN, 1, 0, 0], words]


def test_adapters_leave_matrices_to_be_packed() -> None:
    sizes = traced(LLAMA, lora=LORA)["sizes"]
    layer = sizes["layers"][0]
    adapters = [size for size, is_trained, *_ in layer if is_trained]
    assert sorted(adapters) == 11 * [4 * HIDDEN] + 3 * [4 * 88]
    # The linear layers inside are packed, neither adapters nor norms, embeddings or scores.
    packed = sorted(size for size, _, can_pack, _ in layer if can_pack)
    assert packed == 4 * [HIDDEN * HIDDEN] + 3 * [HIDDEN * 88]
    assert all(is_trained == is_matrix for _, is_trained, _, is_matrix in layer)
    words = [WORDS * HIDDEN, 0, 0, 0]
    assert sizes["rest"] == [words, [HIDDEN, 0, 0, 0], words]


def test_the_loss_of_balanced_experts_is_counted() -> None:
    without = traced(MIXTRAL, "bf16", router_aux_loss_coef=0.0)
    balanced = traced(MIXTRAL, "bf16", router_aux_loss_coef=0.5)
    assert peak(balanced, "bf16") > peak(without, "bf16")
    assert traced(MIXTRAL, "bf16") == balanced, "the model's own weight of the loss is not 0"


def test_a_format_that_fails_is_named_beside_the_others() -> None:
    # torch's fake kernel of `grouped_mm` takes bf16 alone.
    found = traced(MIXTRAL, "fp32", "bf16")
    assert list(found["points"]) == ["bf16"]
    assert found["failed"]["fp32"].startswith("RuntimeError: ")
    assert "failed" not in traced(MIXTRAL, "bf16")


@pytest.mark.parametrize("arithmetic", [["fp32"], ["fp32", "fp16"]])
def test_the_error_is_raised_if_every_format_fails(arithmetic: Sequence[str]) -> None:
    with pytest.raises(RuntimeError):
        traced(MIXTRAL, *arithmetic)


@pytest.mark.usefixtures("unpatched")
def test_a_prepared_trace_has_experts_in_every_format() -> None:
    found = prepared_trace(request(MIXTRAL, "fp32", "bf16", "fp16"))
    assert list(found["points"]) == ["fp32", "bf16", "fp16"] and "failed" not in found


@pytest.mark.usefixtures("unpatched")
def test_a_gpu_keeps_a_byte_of_dropout_for_each_number() -> None:
    on_cpu = prepared_trace(request(T5))
    on_gpu = prepared_trace(request(T5, gpu=True))
    assert 0.8 * peak(on_cpu) < peak(on_gpu) < 0.95 * peak(on_cpu)


@pytest.mark.usefixtures("unpatched")
def test_dropout_of_a_gpu_drops_in_training_alone() -> None:
    prepared_trace(request({**LLAMA, "num_hidden_layers": 1}, gpu=True))
    numbers = torch.ones(1000)
    dropout = torch.nn.functional.dropout
    assert dropout(numbers, 0.5, training=False) is numbers
    assert dropout(numbers, 0.0) is numbers
    assert set(dropout(numbers, 0.5).tolist()) == {0.0, 2.0}


def spread(gpus: int, *, packed: bool = False, size: int = 1 << 60) -> dict[str, Any]:
    limits = {str(gpu): size for gpu in range(gpus)}
    return {"limits": limits, "packed": packed, "format": "bf16"}


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_fullest_gpu_counts_as_a_model_of_its_layers(lora: Mapping[str, int] | None) -> None:
    found = traced(LLAMA, lora=lora, spread=spread(3))
    counted = ("points", "sizes", "piece_rows", "row_tokens")
    assert {name: found[name] for name in counted} == traced(LLAMA, lora=lora)
    part, whole = found["part"], found["sizes"]
    # The embeddings with one layer, three layers, one with the output layer.
    assert found["gpus"] == 3
    assert part["sizes"] == {"layers": whole["layers"][1:4], "rest": []}
    assert_same_peaks(part, traced({**LLAMA, "num_hidden_layers": 3}, lora=lora, whole=True))


def test_packed_layers_leave_the_embeddings_as_the_fullest() -> None:
    config = {**LLAMA, "vocab_size": 1000}
    found = traced(config, lora=LORA, spread=spread(3, packed=True))
    # The embeddings have 64 kB in bf16, the five layers 53 kB in 4 bits, but 166 kB in bf16.
    words = [1000 * HIDDEN, 0, 0, 0]
    assert found["gpus"] == 3 and found["part"]["sizes"] == {"layers": [], "rest": [words]}


def test_a_gpu_has_layers_of_both_stacks() -> None:
    found = traced(T5, spread=spread(2))
    part = found["part"]
    assert found["gpus"] == 2 and 0 < len(part["sizes"]["layers"]) < 8
    depth = -(-len(part["sizes"]["layers"]) // 2)
    alone = traced({**T5, "num_layers": depth, "num_decoder_layers": depth}, whole=True)
    assert_same_peaks(part, alone)


def test_all_layers_may_be_on_one_gpu() -> None:
    found = traced(LLAMA, spread=spread(1))
    assert found["gpus"] == 1 and found["part"]["sizes"] == found["sizes"]
    assert_same_peaks(found["part"], found)


def test_layers_that_no_gpu_has_room_for_are_named() -> None:
    found = traced(LLAMA, spread=spread(2, size=1 << 14))
    assert "part" not in found and "gpus" not in found
    assert says(
        found["unplaced"],
        "give more in max_memory or more GPUs to a pod",
        "the model",
        "0.00, 0.00",
    )
    assert "unplaced" not in traced(LLAMA)
