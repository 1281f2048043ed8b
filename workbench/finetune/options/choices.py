"""Closed sets of option values, such as adapter, precision, optimizer and schedule.

The names of the techniques are in `finetune/techniques/registry`.
"""

from __future__ import annotations

from enum import StrEnum


class Peft(StrEnum):
    NONE = "none"
    """All weights of the model are trained."""
    LORA = "lora"
    """Small matrices beside the model's weights are trained; the model's weights stay fixed."""
    QLORA = "qlora"
    """LoRA with the model's weights in 4 bits (NF4, double quantisation)."""


class Shard(StrEnum):
    """Tensors that `fsdp` shards over the ranks."""

    FULL = "full"
    """Parameters, gradients and optimizer states."""
    GRADS = "grads"
    """Gradients and optimizer states. Parameters stay whole between forward and backward."""
    HYBRID = "hybrid"
    """Parameters, gradients and optimizer states within a pod, with a replica on each pod."""


class LossOn(StrEnum):
    """Tokens that a causal model learns from."""

    ANSWER = "answer"
    ALL = "all"


class CheckpointPolicy(StrEnum):
    """Activations that recomputed layers keep."""

    MATMULS = "matmuls"
    """Outputs of linear layers and of fused attention. All other activations are recomputed."""


class EvalStrategy(StrEnum):
    """Time of evaluations, besides before the first step and after the last."""

    STEPS = "steps"
    """Every `eval_steps` steps."""
    EPOCH = "epoch"
    """At the end of every epoch."""
    NO = "no"
    """Never, not even before the first step and after the last."""


class Precision(StrEnum):
    """Number format of the training arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Communication(StrEnum):
    """Number format of gradients sent to other ranks."""

    FP32 = "fp32"
    BF16 = "bf16"


class Attention(StrEnum):
    """Attention implementation of transformers that a model uses."""

    EAGER = "eager"
    """Plain tensor operations. Every model supports `eager`."""
    SDPA = "sdpa"
    """torch's scaled dot product attention."""
    FLASH_ATTENTION_2 = "flash_attention_2"
    """Package flash-attn, required on pods with GPUs. Only for bf16 and fp16."""


class Sampling(StrEnum):
    """Order of training rows, by transformers' names.

    A seed yields the same order on any number of ranks.
    """

    RANDOM = "random"
    GROUP_BY_LENGTH = "group_by_length"
    """Steps of rows with similar length, in random order, for little padding.

    Steps of fewer than 32 rows mix lengths. Only the longest rows of every eight steps share a
    step.
    """


ROW_ORDER = 2
"""Version of the order of `group_by_length`. Version 1 did not mix lengths in small steps."""


class Schedule(StrEnum):
    """Course of the learning rate after the warm-up, by transformers' names."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    """Constant from the first step, without a warm-up."""
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class MuonRate(StrEnum):
    """Scale of Muon's learning rate for a matrix, by torch's names."""

    MATCH_RMS_ADAMW = "match_rms_adamw"
    """0.2 times the root of the longer side: updates as large as AdamW's."""
    ORIGINAL = "original"
    """Root of rows by columns, at least 1, as in DeepSpeed. Rates are around 0.02."""


class Optimizer(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    LION = "lion"
    """One state per weight; see `LionOptions`."""
    MUON = "muon"
    """Orthogonalized updates of the hidden layers' matrices, AdamW for other weights.

    See `MuonOptions`. Only under `single`, `ddp`, `zero1` and `zero2`, and without adapters.
    """
    ADAMW_8BIT = "adamw-8bit"
    """AdamW with states in 8 bits (bitsandbytes)."""
    PAGED_ADAMW = "paged-adamw"
    """AdamW with states that move to host memory if GPU memory runs out (bitsandbytes)."""
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    """AdamW with paged states in 8 bits (bitsandbytes)."""

    @property
    def uses_bitsandbytes(self) -> bool:
        return self in (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)

    @property
    def is_own(self) -> bool:
        """Whether the package makes the optimizer, and not transformers or DeepSpeed."""
        return self in (Optimizer.LION, Optimizer.MUON)
