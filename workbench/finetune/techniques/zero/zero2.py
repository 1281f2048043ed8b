"""Technique `zero2`."""

from __future__ import annotations

from workbench.finetune.techniques.zero.zero import Zero


class Zero2(Zero):
    """DeepSpeed ZeRO stage 2: gradients and optimizer states sharded."""

    name = "zero2"
    engine = "deepspeed-zero2"
    words = "ZeRO stage 2"
    config = "zero2.json"
    zero_stage = 2
    preference = 30
