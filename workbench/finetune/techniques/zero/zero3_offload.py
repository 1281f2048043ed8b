"""Technique `zero3-offload`."""

from __future__ import annotations

from workbench.base.errors import ConfigError
from workbench.finetune.options.choices import BITSANDBYTES
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.zero.zero3 import Zero3


class Zero3Offload(Zero3):
    """ZeRO stage 3 with optimizer states and parameters kept in host memory."""

    name = "zero3-offload"
    config = "zero3-offload.json"
    offloads = True
    may_offload = 2
    preference = 60

    def refuse(self, job: FineTuneOptions) -> None:
        if job.optimizer in BITSANDBYTES:
            raise ConfigError(
                f"optimizer '{job.optimizer}' works on GPUs, and "
                "'zero3-offload' updates on the host; use 'adamw', or 'zero3'"
            )
        super().refuse(job)
