"""The closed sets a job chooses from: technique, adapter, precision, launcher, optimizer, and what FSDP shards."""

from __future__ import annotations

from enum import StrEnum


class Technique(StrEnum):
    """Names of the techniques. `finetune/techniques` has a file for each, which says what it does."""

    SINGLE = "single"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    ZERO3_OFFLOAD = "zero3-offload"
    FSDP = "fsdp"
    LOCAL_SGD = "local-sgd"


class Peft(StrEnum):
    NONE = "none"
    """All of the model's own."""
    LORA = "lora"
    """Small matrices beside the model's own, which stay as they are."""
    QLORA = "qlora"
    """The same, with the model's own weights in 4 bits (NF4, double quantisation)."""


class Shard(StrEnum):
    """What `fsdp` spreads over the ranks."""

    FULL = "full"
    """Parameters, gradients and optimizer states."""
    GRADS = "grads"
    """Gradients and optimizer states; parameters stay whole between forward and backward."""
    HYBRID = "hybrid"
    """Everything within a pod, a replica on each pod."""


class LossOn(StrEnum):
    """Which tokens a causal model learns from."""

    ANSWER = "answer"
    ALL = "all"


class EvalStrategy(StrEnum):
    """When a job evaluates, beside before its first step and after its last."""

    STEPS = "steps"
    """Every `eval_steps` steps."""
    EPOCH = "epoch"
    """At the end of every epoch."""
    NO = "no"
    """Never, before the first step and after the last neither."""


class Precision(StrEnum):
    """The number format of the training arithmetic."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"


class Communication(StrEnum):
    """The number format of gradients on their way to the other ranks."""

    FP32 = "fp32"
    BF16 = "bf16"


class Attention(StrEnum):
    """Which of transformers' implementations of attention a model uses."""

    EAGER = "eager"
    """Plain tensor operations, which every model has."""
    SDPA = "sdpa"
    """torch's scaled dot product attention."""
    FLASH_ATTENTION_2 = "flash_attention_2"
    """The package flash-attn, which pods with GPUs must have; for bf16 and fp16."""


class Sampling(StrEnum):
    """In what order rows are trained on; transformers' names. A seed gives the same order on any number of ranks."""

    RANDOM = "random"
    GROUP_BY_LENGTH = "group_by_length"
    """Steps that read rows of like length, in random order: little padding. Steps of fewer than 32 rows mix lengths;
    only the longest rows of every eight steps are one step."""


ROW_ORDER = 2
"""Version of the order that `group_by_length` gives. 1, of earlier runs, did not mix lengths in small steps."""


class Schedule(StrEnum):
    """How the learning rate goes on once it has risen; transformers' names."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    """Constant from the first step: without a warm-up."""
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    INVERSE_SQRT = "inverse_sqrt"
    COSINE_WITH_MIN_LR = "cosine_with_min_lr"
    COSINE_WARMUP_WITH_MIN_LR = "cosine_warmup_with_min_lr"
    WARMUP_STABLE_DECAY = "warmup_stable_decay"


class Optimizer(StrEnum):
    ADAMW = "adamw"
    SGD = "sgd"
    ADAMW_8BIT = "adamw-8bit"
    """AdamW whose states are held in 8 bits (bitsandbytes)."""
    PAGED_ADAMW = "paged-adamw"
    """AdamW whose states move to host memory when the GPU's is short (bitsandbytes)."""
    PAGED_ADAMW_8BIT = "paged-adamw-8bit"
    """Both."""

    @property
    def uses_bitsandbytes(self) -> bool:
        return self not in (Optimizer.ADAMW, Optimizer.SGD)
