"""DeepSpeed's JSON configuration: the file, and the values for the ranks of a job."""

from __future__ import annotations

from workbench.finetune.deepspeed.files import load as load_deepspeed_config
from workbench.finetune.job.deepspeed_config import resolve as resolve_deepspeed_config

__all__ = [
    "load_deepspeed_config",
    "resolve_deepspeed_config",
]
