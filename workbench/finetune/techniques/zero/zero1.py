"""Technique `zero1`."""

from __future__ import annotations

from workbench.finetune.techniques.sizes import Setting, Trace
from workbench.finetune.techniques.zero.zero import Zero


class Zero1(Zero):
    """DeepSpeed ZeRO stage 1: optimizer states sharded."""

    name = "zero1"
    engine = "deepspeed-zero1"
    words = "ZeRO stage 1"
    config = "zero1.json"
    zero_stage = 1
    preference = 20

    def gradients_kept(self, setting: Setting, trace: Trace, arrived: float) -> float:
        # Gradients stay whole over micro-batches.
        if setting.accumulates:
            return float(setting.weight_bytes * trace.trained)
        return super().gradients_kept(setting, trace, arrived)
