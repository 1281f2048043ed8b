"""Closed sets of option values, such as adapter, precision, optimizer and schedule.

The names of the techniques are in `finetune/techniques/registry`.
"""

from __future__ import annotations

from typing import Literal

Peft = Literal["none", "lora", "qlora"]
"""Trained weights.

- `none`: all weights of the model.
- `lora`: small matrices beside the model's weights; the model's weights stay fixed.
- `qlora`: LoRA with the model's weights in 4 bits (NF4, double quantisation).
"""
Shard = Literal["full", "grads", "hybrid"]
"""Tensors that `fsdp` shards over the ranks.

- `full`: parameters, gradients and optimizer states.
- `grads`: gradients and optimizer states. Parameters stay whole between forward and backward.
- `hybrid`: as `full` within a pod, with a replica on each pod.
"""
Reduce = Literal["micro_batch", "step"]
"""Time of the sum of the gradients over the ranks under `fsdp`.

- `micro_batch`: after each micro-batch. A rank keeps the gradients of its shard alone.
- `step`: once a step. A rank keeps whole gradients, and sends less under gradient accumulation.
"""
LossOn = Literal["answer", "all"]
"""Tokens that a causal model learns from."""
CheckpointPolicy = Literal["matmuls"]
"""Activations that recomputed layers keep.

- `matmuls`: outputs of linear layers and of fused attention. All others are recomputed.
"""
EvalStrategy = Literal["steps", "epoch", "no"]
"""Time of evaluations, besides before the first step and after the last.

- `steps`: every `eval_steps` steps.
- `epoch`: at the end of every epoch.
- `no`: never, not even before the first step and after the last.
"""
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
"""Number format of the training arithmetic."""
Communication = Literal["fp32", "bf16"]
"""Number format of gradients sent to other ranks."""
Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""Attention implementation of transformers that a model uses.

- `eager`: plain tensor operations. Every model supports `eager`.
- `sdpa`: torch's scaled dot product attention.
- `flash_attention_2`: package flash-attn, required on pods with GPUs. Only for bf16 and fp16.
- `flash_attention_3`: package flash-attn-3, on GPUs of the Hopper generation or later.
- `flex_attention`: torch's compiled attention, on GPUs. Packed rows need no dense mask.
"""
Sampling = Literal["random", "group_by_length"]
"""Order of training rows, by transformers' names. A seed yields the same order on all ranks.

- `group_by_length`: for models that read rows in lines, random steps with as many tokens on every
  rank. For other models, steps of rows with similar length, in random order, for little padding.
  Steps of fewer than 32 rows mix lengths; only the longest rows of every eight steps share a step.
"""
Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
"""Course of the learning rate after the warm-up, by transformers' names.

- `constant`: constant from the first step, without a warm-up.
"""
MuonRate = Literal["match_rms_adamw", "original"]
"""Scale of Muon's learning rate for a matrix, by torch's names.

- `match_rms_adamw`: 0.2 times the root of the longer side: updates as large as AdamW's.
- `original`: root of rows by columns, at least 1, as in DeepSpeed. Rates are around 0.02.
"""
Optimizer = Literal["adamw", "sgd", "lion", "muon", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"]
"""Optimizer of the trained weights.

- `lion`: one state per weight; see `LionOptions`.
- `muon`: orthogonalized updates of the hidden layers' matrices, AdamW for other weights; see
  `MuonOptions`. Only under `single`, `ddp`, `zero1` and `zero2`, and without adapters.
- `adamw-8bit`: AdamW with states in 8 bits (bitsandbytes).
- `paged-adamw`: AdamW with states that move to host memory if GPU memory runs out (bitsandbytes).
- `paged-adamw-8bit`: AdamW with paged states in 8 bits (bitsandbytes).
"""
BITSANDBYTES = ("adamw-8bit", "paged-adamw", "paged-adamw-8bit")
"""Optimizers of the package bitsandbytes."""
OWN_OPTIMIZERS = ("lion", "muon")
"""Optimizers that this package makes, and not transformers or DeepSpeed."""
