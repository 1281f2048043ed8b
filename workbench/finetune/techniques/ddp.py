"""Technique `ddp`."""

from __future__ import annotations

from typing import Any

from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.plain import Plain
from workbench.finetune.techniques.sizes import Exchanges


class DDP(Plain):
    """torch's DistributedDataParallel: every rank holds everything, gradients are averaged."""

    name = "ddp"
    engine = "ddp"
    words = "DistributedDataParallel"
    copies_gradients = True
    preference = 10
    timed_as = "single"

    def bound_to_ranks(self, job: FineTuneOptions) -> str:
        # Every rank has whole states, in any block format.
        del job
        return ""

    def runs(self, trainer: Any) -> bool:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = trainer.model_wrapped
        wrapped = getattr(wrapped, "_orig_mod", wrapped)  # of a compiled model
        return isinstance(wrapped, DistributedDataParallel)

    def sending_s(self, exchanges: Exchanges, accumulation: int) -> float:
        del accumulation  # gradients are sent once a step
        return exchanges.wait_s + exchanges.reduced_s
