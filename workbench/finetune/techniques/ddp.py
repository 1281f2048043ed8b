"""Technique `ddp`."""

from __future__ import annotations

from typing import Any

from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.plain import Plain
from workbench.finetune.techniques.step_hooks import TechniquePoints


class TensorPoints(TechniquePoints):
    """Hooks of DDP with `tensor_parallel`: only the ranks of the same part exchange gradients."""

    def __init__(self, job: FineTuneOptions) -> None:
        given = job.training.items()
        self._options = {
            name.removeprefix("ddp_"): value for name, value in given if name.startswith("ddp_")
        }
        self._norm: Any = None

    def wrap(self, accelerator: Any, model: Any, **options: Any) -> Any:
        # accelerate prepares a model for evaluation in the same way, but without its own DDP, whose
        # ranks are all ranks.
        prepared = super().wrap(accelerator, model, **{"evaluation_mode": True, **options})
        return self.tensor.replicated(prepared, **self._options)

    def clip(self, trainer: Any, _model: Any) -> Any:
        self._norm = self.tensor.clip(trainer.model.parameters(), trainer.args.max_grad_norm)
        return self._norm

    def norm(self, trainer: Any, _model: Any, _clipped: Any) -> Any:
        norm, self._norm = self._norm, None
        if norm is None:
            norm = self.tensor.clip(trainer.model.parameters(), float("inf"))
        return norm


class DDP(Plain):
    """torch's DistributedDataParallel: every rank holds everything, gradients are averaged."""

    name = "ddp"
    engine = "ddp"
    words = "DistributedDataParallel"
    engine_of_one = "none"  # accelerate wraps a model for one rank on CPUs, not for one on a GPU
    copies_gradients = True
    preference = 10

    def bound_to_ranks(self, job: FineTuneOptions) -> str:
        # Every rank has whole states, in any block format.
        del job
        return ""

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        return TensorPoints(job) if job.tensor_parallel > 1 else TechniquePoints()

    def runs(self, trainer: Any) -> bool:
        from torch.nn.parallel import DistributedDataParallel

        wrapped = trainer.model_wrapped
        wrapped = getattr(wrapped, "_orig_mod", wrapped)  # of a compiled model
        return isinstance(wrapped, DistributedDataParallel)
