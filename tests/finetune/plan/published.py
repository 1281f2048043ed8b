"""Memory that people published of their runs, with the settings of the runs.

Figures are in GiB: the sources write GB and do not say which. `COUNTS` names what a figure counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

USED = "used"
"""Memory of the device in use, as nvidia-smi and DCGM show it: the CUDA context is in it."""
ALLOCATED = "allocated"
"""Peak of `torch.cuda.max_memory_allocated`: tensors alone."""

WALK = "https://github.com/dennislee22/deepspeed-train-CML"
PEFT = "https://github.com/huggingface/peft, README.md of 2023-03, DeepSpeed 0.8"
TUNE = "https://github.com/pytorch/torchtune, README.md of 2024-09"
FMS = (
    "https://github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb*"
)
KUBE = "an article on Llama 2 with FSDP and torchrun on Kubernetes, V100 of 32 GB"


@dataclass(frozen=True, kw_only=True)
class Published:
    source: str
    job: Mapping[str, object]
    pods: int = 1
    gpus: int = 1
    gib: float | None = None
    """Published peak of a GPU."""
    counts: str = USED
    limit_gib: float | None = None
    """Memory of the GPU, for a row that says whether the run fits."""
    fits: bool = True
    host_gib: float | None = None
    """Published memory of the process on the host, with `process_gib` of the runtime itself."""
    process_gib: float = 0.0
    """Published memory of the process with the model on the GPU, from the same table."""
    answers: tuple[int, int] | None = None
    """Beams and new tokens of the answers in the evaluations of the run."""
    pieces: bool = False
    """Whether the run's loss made the scores piece by piece."""
    keeps_gradients: bool = False
    """Whether every layer's input and its gradient stay until the end of the backward pass.

    torch's first interface of FSDP waits for the gradients of the inputs of a unit that has frozen
    weights (`register_multi_grad_hook` in `_register_post_backward_reshard_only_hook` of
    torch/distributed/fsdp/_runtime_utils.py), and removes the hook at the end of the pass. Until
    then, the hook keeps the recomputed layer's input and its gradient. Units without frozen
    weights have no such hook, and neither has `fully_shard`, which this package uses.
    """
    apart: Mapping[str, str] = field(default_factory=dict)
    """Why a figure is outside of the bounds, by name: `gpu`, `host` or `fits`."""

    @property
    def offloads(self) -> bool:
        return "offload" in str(self.job["technique"])


# ---- The walk-through: WikiSQL padded to 96 + 96 tokens, FP32, batch 32, one A100 of 40 GB a pod.
# The commands are in workbench/benchmark/published.py, and a test compares the settings with them.
# `--gradient_checkpointing False` is True, by argparse's `type=bool`. Every evaluation generates:
# predict_with_generate, generation_num_beams 4, generation_max_length 128, batch 32 (T5 3B: 1).
_WALK: Mapping[str, object] = {
    "precision": "fp32",
    "per_device_train_batch_size": 32,
    "max_source_length": 96,
    "max_target_length": 96,
    "gradient_checkpointing": True,
}
# dsconfig/zero1profiler.json and zero3profiler.json of the walk-through
_ZERO1 = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}
_ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}


def _walk(
    technique: str, model: str, pods: int, given: Mapping[str, object] | None = None, **row: object
) -> Published:
    config = {"zero1": _ZERO1, "zero3-offload": _ZERO3}.get(technique)
    more = {} if config is None else {"deepspeed": config}
    job = {"model": model, "technique": technique, **_WALK, **more, **(given or {})}
    return Published(source=WALK, job=job, pods=pods, answers=(4, 128), **row)  # type: ignore[arg-type]


# ---- PEFT: ought/raft twitter_complaints, batch 8, FP32, LoRA of rank 8, one A100 of 80 GB.
# examples/causal_language_modeling pads to 64 tokens; examples/conditional_generation pads to the
# longest tweet of a batch, taken here as 64 too, with labels of 8. DeepSpeed's JSON is the one
# that accelerate made of its YAML: stage 3, offload of both to the CPU, no number.
_MISTRAL: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHAPES: Mapping[str, Mapping[str, object]] = {
    # https://huggingface.co/bigscience/T0_3B/blob/main/config.json
    "T0_3B": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 2048,
        "d_kv": 64,
        "d_ff": 5120,
        "num_heads": 32,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
    },
    # https://huggingface.co/bigscience/mt0-xxl/blob/main/config.json
    "mt0-xxl": {
        "model_type": "mt5",
        "vocab_size": 250112,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_heads": 64,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
    },
    # https://huggingface.co/bigscience/bloomz-7b1/blob/main/config.json
    "bloomz-7b1": {
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
    },
    # https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json and -70B
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    # https://huggingface.co/mistralai/Mistral-7B-v0.1/blob/main/config.json and Mixtral-8x7B
    "Mistral-7B": {"model_type": "mistral", **_MISTRAL, "sliding_window": 4096},
    "Mixtral-8x7B": {
        "model_type": "mixtral",
        **_MISTRAL,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
_PEFT: Mapping[str, object] = {
    "precision": "fp32",
    "per_device_train_batch_size": 8,
    "max_source_length": 64,
    "max_target_length": 8,
}
_LORA: Mapping[str, object] = {**_PEFT, "peft": "lora", "lora": {"r": 8}}
_ACCELERATE = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
}


def _peft(model: str, *, offload: bool = False, full: bool = False, **row: object) -> Published:
    job: dict[str, object] = {"model": model, "technique": "single", **(_PEFT if full else _LORA)}
    if model == "bloomz-7b1":
        job["max_source_length"] = 56
    if offload:
        job |= {"technique": "zero3-offload", "deepspeed": _ACCELERATE}
    return Published(source=PEFT, job=job, counts=ALLOCATED, **row)  # type: ignore[arg-type]


# ---- torchtune: batch 2, packed to 2048 tokens, bf16, fused AdamW, loss in pieces; adapters of
# rank 8 at q_proj, v_proj (recipes/configs/llama3_1/8B_lora_single_device.yaml).
_TUNE: Mapping[str, object] = {
    "precision": "bf16",
    "peft": "lora",
    "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "per_device_train_batch_size": 2,
    "max_source_length": 1024,
    "max_target_length": 1024,
    "gradient_checkpointing": True,
    "loss_on": "all",
}


def _tune(model: str, more: Mapping[str, object], **row: object) -> Published:
    job = {"model": model, "technique": "single", **_TUNE, **more}
    return Published(source=TUNE, job=job, counts=ALLOCATED, pieces=True, **row)  # type: ignore[arg-type]


# ---- fms-acceleration: sequences of 4096 tokens (tokens a second, times seconds, a step), all
# recomputed, flash attention, adapters of rank 16 at q, k, v and o. FSDP is accelerate's, of
# torch's first interface. Rows with Liger's fused loss make the scores piece by piece.
_FMS: Mapping[str, object] = {
    "technique": "single",
    "precision": "bf16",
    "max_source_length": 2048,
    "max_target_length": 2048,
    "gradient_checkpointing": True,
    "loss_on": "all",
}
_FMS_LORA: Mapping[str, object] = {
    "peft": "lora",
    "lora": {"r": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
_FMS_QLORA: Mapping[str, object] = {**_FMS_LORA, "peft": "qlora"}
_FP16: Mapping[str, object] = {**_FMS_LORA, "precision": "fp16"}


def _fms(model: str, rows: int, more: Mapping[str, object], **row: object) -> Published:
    job = {"model": model, **_FMS, **more, "per_device_train_batch_size": rows}
    if row.get("gpus"):
        job["technique"] = "fsdp"
        row["keeps_gradients"] = "peft" in more
    return Published(source=FMS, job=job, counts=ALLOCATED, **row)  # type: ignore[arg-type]


# ---- FSDP on Kubernetes: fp16, batch 1 x 2048, recomputed; SGD unless said.
_KUBE: Mapping[str, object] = {
    "technique": "fsdp",
    "precision": "fp16",
    "optimizer": "sgd",
    "per_device_train_batch_size": 1,
    "max_source_length": 1024,
    "max_target_length": 1024,
    "gradient_checkpointing": True,
    "loss_on": "all",
}
_V100_GIB = 31.7
_MOMENTUM = "whether SGD has a momentum is not stated; with one, as large as the weights, it agrees"


def _kube(gpus: int, more: Mapping[str, object], **row: object) -> Published:
    job = {**_KUBE, **more}
    return Published(source=KUBE, job=job, gpus=gpus, **row)  # type: ignore[arg-type]


_7B = {"model": "llama-2-7b"}
_13B = {"model": "llama-2-13b"}
_FP32 = {"precision": "fp32"}

PUBLISHED: Mapping[str, Published] = {
    "t5-small": _walk("single", "t5-small", 1, gib=3),
    "t5-large": _walk("single", "t5-large", 1, gib=15),
    "t5-small zero1 x 3": _walk("zero1", "t5-small", 3, {"gradient_checkpointing": False}, gib=5),
    "t5-large zero1 x 3": _walk("zero1", "t5-large", 3, gib=13),
    # The table has 15, the text 14.
    "t5-large zero1 x 2": _walk("zero1", "t5-large", 2, gib=14.5),
    "t5-large zero3-offload x 3": _walk("zero3-offload", "t5-large", 3, gib=9),
    "t5-3b": _walk("single", "t5-3b", 1, limit_gib=39.4, fits=False),
    "t5-3b zero3-offload x 3": _walk(
        "zero3-offload",
        "t5-3b",
        3,
        {"per_device_train_batch_size": 1},
        gib=21,
        apart={
            "gpu": "planned at a quarter: a need, where 21 GB were held. Its script makes the "
            "model before the arguments of training, so DeepSpeed moves 10.6 GiB of whole weights "
            "to the GPU before it cuts them, and torch keeps the memory. Weights are gathered on "
            "another stream, which cannot use it, and fill 5.2 GiB with 4.0. That makes 16.8; the "
            "other 2.8 to 4.2 GiB (GB are 10^9 or 2^30 bytes) were not found out. This package "
            "never moves a whole model"
        },
    ),
    "T0_3B full": _peft("T0_3B", full=True, gib=47.14),
    "T0_3B lora": _peft("T0_3B", gib=14.4),
    "T0_3B lora offload": _peft(
        "T0_3B",
        offload=True,
        gib=9.8,
        host_gib=17.8,
        process_gib=2.96,
        apart={
            "host": "glibc kept pieces below 32 MiB of the pickled checkpoint, which were read "
            "into memory (19.0 GiB in another run of the same example); the larger weights of "
            "mt0-xxl left nothing, and this package reads pages of files"
        },
    ),
    "mt0-xxl lora": _peft("mt0-xxl", gib=56),
    "mt0-xxl lora offload": _peft("mt0-xxl", offload=True, gib=22, host_gib=52, process_gib=3.0),
    "bloomz-7b1 lora": _peft("bloomz-7b1", gib=32),
    "bloomz-7b1 lora offload": _peft(
        "bloomz-7b1",
        offload=True,
        gib=18.1,
        host_gib=35,
        process_gib=3.8,
        apart={"host": "4.5 GiB more than weights and process, as one embedding: not found out"},
    ),
    "Llama-3.1-8B lora": _tune("Llama-3.1-8B", {}, gib=16.2),
    "Llama-3.1-8B lora, nothing recomputed": _tune(
        "Llama-3.1-8B",
        {"gradient_checkpointing": False},
        gib=30.3,
        apart={"gpu": "compiled layers keep fewer activations than those that are planned"},
    ),
    "Llama-3.1-8B qlora": _tune("Llama-3.1-8B", {"peft": "qlora"}, gib=7.4),
    "Llama-3.1-70B lora fsdp x 8": _tune("Llama-3.1-70B", {"technique": "fsdp"}, gpus=8, gib=27.6),
    "fms 8B lora, 4 rows": _fms("Llama-3.1-8B", 4, _FMS_LORA, pieces=True, gib=23.2),
    "fms 8B lora, 8 rows": _fms("Llama-3.1-8B", 8, _FMS_LORA, pieces=True, gib=31.3),
    "fms 8B lora, 16 rows": _fms("Llama-3.1-8B", 16, _FMS_LORA, pieces=True, gib=47.4),
    "fms 8B qlora, 4 rows": _fms("Llama-3.1-8B", 4, _FMS_QLORA, pieces=True, gib=13.4),
    "fms 8B qlora, 8 rows": _fms("Llama-3.1-8B", 8, _FMS_QLORA, pieces=True, gib=21.4),
    "fms 8B qlora, 32 rows": _fms("Llama-3.1-8B", 32, _FMS_QLORA, pieces=True, gib=69.0),
    "fms 8B lora, whole scores, 4 rows": _fms("Llama-3.1-8B", 4, _FMS_LORA, gib=35.1),
    "fms 8B lora, whole scores, 8 rows": _fms(
        "Llama-3.1-8B",
        8,
        _FMS_LORA,
        gib=55.0,
        apart={"gpu": "planned 16 % too high; this package makes no whole scores of a Llama"},
    ),
    "fms 8B fsdp x 4, 4 rows": _fms("Llama-3.1-8B", 4, {}, gpus=4, pieces=True, gib=37.4),
    "fms 8B fsdp x 4, 8 rows": _fms("Llama-3.1-8B", 8, {}, gpus=4, pieces=True, gib=41.0),
    "fms 8B fsdp x 4, 16 rows": _fms("Llama-3.1-8B", 16, {}, gpus=4, pieces=True, gib=56.2),
    "fms Mistral lora, 4 rows": _fms("Mistral-7B", 4, _FP16, gib=24.3),
    "fms Mistral lora, 8 rows": _fms("Mistral-7B", 8, _FP16, gib=34.6),
    "fms Mistral lora fsdp x 2, 2 rows": _fms("Mistral-7B", 2, _FP16, gpus=2, gib=14.1),
    "fms Mistral lora fsdp x 2, 4 rows": _fms("Mistral-7B", 4, _FP16, gpus=2, gib=20.0),
    "fms Mixtral lora fsdp x 2, 2 rows": _fms("Mixtral-8x7B", 2, _FP16, gpus=2, gib=53.6),
    "fms Mixtral lora fsdp x 2, 4 rows": _fms("Mixtral-8x7B", 4, _FP16, gpus=2, gib=59.9),
    "fms 8B lora fsdp x 2, 4 rows": _fms(
        "Llama-3.1-8B", 4, _FMS_LORA, gpus=2, pieces=True, gib=21.8
    ),
    "fms 8B lora fsdp x 2, 8 rows": _fms(
        "Llama-3.1-8B", 8, _FMS_LORA, gpus=2, pieces=True, gib=33.6
    ),
    "fms 8B lora fsdp x 4, 8 rows": _fms(
        "Llama-3.1-8B", 8, _FMS_LORA, gpus=4, pieces=True, gib=29.8
    ),
    "fms 8B qlora fsdp x 2, 4 rows": _fms(
        "Llama-3.1-8B", 4, _FMS_QLORA, gpus=2, pieces=True, gib=16.6
    ),
    "fms 8B qlora fsdp x 4, 8 rows": _fms(
        "Llama-3.1-8B", 8, _FMS_QLORA, gpus=4, pieces=True, gib=27.0
    ),
    "Llama-2-7B fsdp x 4": _kube(4, _7B, gib=25, apart={"gpu": _MOMENTUM}),
    "Llama-2-7B fsdp x 4, adam": _kube(
        4, {**_7B, "optimizer": "adamw"}, limit_gib=_V100_GIB, fits=False
    ),
    "Llama-2-13B fsdp x 8, FP32": _kube(8, {**_13B, **_FP32}, limit_gib=_V100_GIB),
    "Llama-2-13B fsdp x 6, FP32": _kube(
        6, {**_13B, **_FP32}, limit_gib=_V100_GIB, fits=False, apart={"fits": _MOMENTUM}
    ),
    "Llama-2-13B fsdp x 6": _kube(6, _13B, limit_gib=_V100_GIB),
    "Llama-2-13B fsdp x 4": _kube(
        4, _13B, limit_gib=_V100_GIB, fits=False, apart={"fits": _MOMENTUM}
    ),
}
