from __future__ import annotations

import pytest

from tests.support.sentences import says
from workbench.finetune.plan.trace.trace import (
    trace,
)

pytestmark = pytest.mark.slow

SHAPES = {
    "t5": {
        "model_type": "t5",
        "vocab_size": 500,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
    }
    | {"num_layers": 5, "num_decoder_layers": 5, "decoder_start_token_id": 0},
    "llama": {"model_type": "llama", "vocab_size": 500, "hidden_size": 32, "intermediate_size": 88}
    | {"num_hidden_layers": 5, "num_attention_heads": 4},
    "gemma3": {
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
    },
    # Dense layers before mixtures of experts.
    "deepseek": {
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
    },
    # A family that names no class of its layers.
    "pegasus": {
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
    },
}


@pytest.mark.parametrize(
    ("shape", "arithmetic", "more"),
    [
        ("t5", "fp32", {}),
        ("t5", "autocast-bf16", {"checkpointing": True}),
        ("llama", "bf16", {"checkpointing": True, "lora": {"r": 4}}),
        ("llama", "fp32", {"gpu": True}),
        ("gemma3", "autocast-bf16", {"checkpointing": True, "lora": {"r": 4}}),
        ("deepseek", "bf16", {"checkpointing": True}),
        ("pegasus", "fp32", {}),
    ],
)
def test_two_shallow_copies_say_what_the_whole_model_does(
    shape: str, arithmetic: str, more: dict[str, object]
) -> None:
    request = {
        "config": SHAPES[shape],
        "source": 24,
        "target": 16,
        "arithmetic": [arithmetic],
        "lora": None,
        **more,
    }
    shallow, whole = trace(request), trace({**request, "whole": True})
    assert shallow["sizes"] == whole["sizes"]

    def peak(found: dict[str, dict[str, list[list[float]]]], rows: int, weight: float) -> float:
        return max(
            base + rows * row + weight * grads
            for base, row, _, _, grads in found["points"][arithmetic]
        )

    for rows in (1, 5, 40):
        for weight in (0, 2, 4, 100):
            assert peak(shallow, rows, weight) == pytest.approx(peak(whole, rows, weight), rel=1e-9)


def test_the_matrices_of_hidden_layers_are_told_apart() -> None:
    request = {"source": 8, "target": 8, "arithmetic": ["fp32"], "lora": None}
    sizes = trace({**request, "config": SHAPES["llama"]})["sizes"]
    assert [
        sum(size for size, *_, is_matrix in layer if is_matrix) for layer in sizes["layers"]
    ] == [4 * 32 * 32 + 3 * 32 * 88] * 5
    assert [is_matrix for *_, is_matrix in sizes["rest"]] == [0, 0, 0]


def test_of_spread_layers_the_fullest_device_is_a_model_of_its_layers_alone() -> None:
    request = {
        "config": SHAPES["llama"],
        "source": 24,
        "target": 16,
        "arithmetic": ["fp32"],
        "lora": None,
    }
    spread = {
        "limits": {"0": 1 << 60, "1": 1 << 60, "2": 1 << 60},
        "packed": False,
        "format": "fp32",
    }
    found = trace({**request, "spread": spread})
    same = ("points", "sizes", "piece_rows", "row_tokens")
    assert {name: found[name] for name in same} == trace(request)
    part, whole = found["part"]["sizes"], found["sizes"]
    # The embeddings with one layer, three layers, one with the output layer.
    assert found["gpus"] == 3 and part == {"layers": whole["layers"][1:4], "rest": []}
    alone = trace({**request, "config": SHAPES["llama"] | {"num_hidden_layers": 3}, "whole": True})
    for rows in (1, 40):
        peaks = [
            max(base + rows * row for base, row, *_ in one["points"]["fp32"])
            for one in (found["part"], alone)
        ]
        assert peaks[0] == pytest.approx(peaks[1], rel=1e-9)
    small = trace({**request, "spread": {**spread, "limits": {"0": 1 << 12, "1": 1 << 16}}})
    assert "part" not in small and says(
        small["unplaced"], "finetune.pipeline.placement.device-map-room"
    )


def test_formats_that_cannot_be_traced_are_named_and_the_others_are_traced() -> None:
    shape = {"model_type": "mixtral", "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48}
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    request = {"config": {**shape, **heads}, "source": 8, "target": 8, "lora": None}
    # torch's own fake kernel of grouped_mm takes bf16
    # alone; `prepared_trace` puts another in its place.
    found = trace({**request, "arithmetic": ["bf16", "fp32"]})
    assert list(found["points"]) == ["bf16"] and list(found["failed"]) == ["fp32"]
    assert "RuntimeError" in found["failed"]["fp32"]
    with pytest.raises(RuntimeError):
        trace({**request, "arithmetic": ["fp32"]})


def test_stacks_of_unequal_depth_are_traced_as_they_are() -> None:
    config = SHAPES["t5"] | {"num_decoder_layers": 3}
    found = trace(
        {"config": config, "source": 8, "target": 8, "arithmetic": ["fp32"], "lora": None}
    )
    assert len(found["sizes"]["layers"]) == 8
    assert found["points"]["fp32"]
