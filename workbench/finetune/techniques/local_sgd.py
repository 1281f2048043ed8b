"""Technique `local-sgd`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from workbench.base.errors import ConfigError
from workbench.finetune.options.adapters import LocalSgd as Options
from workbench.finetune.options.options import FineTuneOptions
from workbench.finetune.techniques.plain import Plain
from workbench.finetune.techniques.sizes import Setting
from workbench.finetune.techniques.step_hooks import TechniquePoints


class ApartPoints(TechniquePoints):
    """Hooks of local SGD: ranks train apart, and their weights are averaged every few steps."""

    ranks_train_apart = True

    def __init__(self, job: FineTuneOptions) -> None:
        self._options = Options.from_dict(job.local_sgd)

    def wrap(self, accelerator: Any, model: Any, **options: Any) -> Any:
        # accelerate prepares a model for evaluation in the same way as for training, but without
        # DDP.
        return super().wrap(accelerator, model, **{"evaluation_mode": True, **options})

    def common_weights(self) -> AbstractContextManager[None]:
        if self.averaging is None:
            return nullcontext()
        averaged: AbstractContextManager[None] = self.averaging.averaged()
        return averaged

    def first_callbacks(self, trainer: Any) -> Sequence[Any]:
        from workbench.finetune.techniques.on_pods.averaging import ParameterAveraging

        # The weights are already on the trainer's device. The averages come before other callbacks
        # of a step.
        self.averaging = ParameterAveraging(trainer.model, self._options)
        return (self.averaging,)


class LocalSGD(Plain):
    """Every rank holds everything and steps by itself.

    The ranks average the weights every few steps, with an outer momentum.
    """

    name = "local-sgd"
    engine = "local-sgd"
    words = "local SGD"
    options = "local_sgd"
    apart = True
    # Local SGD sends least, but its losses differ from the other techniques' losses.
    preference = 80
    no_muon = "averages the weights of ranks that train apart, which is untested with Muon"
    same_losses = False
    recipe = False

    def refuse_ranks(self, job: FineTuneOptions, ranks: int) -> None:
        del job
        if ranks < 2:
            raise ConfigError(
                "technique 'local-sgd' averages the weights of several "
                "ranks, and there is one; use 'single', or two pods or more"
            )

    def bound_to_ranks(self, job: FineTuneOptions) -> str:
        del job
        return "each rank of local-sgd has weights of its own"

    def sync_steps(self, job: FineTuneOptions) -> int:
        return Options.from_dict(job.local_sgd).sync_steps

    def points(self, job: FineTuneOptions) -> TechniquePoints:
        return ApartPoints(job)

    def runs(self, trainer: Any) -> bool:
        return getattr(trainer, "averaging", None) is not None

    def snapshot(self, trainer: Any, *, rank: int) -> dict[str, object] | None:
        state = super().snapshot(trainer, rank=rank) or {}
        return {**state, "averaging": trainer.averaging.state()}

    def restore(self, trainer: Any, state: Any) -> None:
        super().restore(trainer, state)
        trainer.averaging.restore(state["averaging"])

    def setting(self, plain: Setting, job: FineTuneOptions, config: Mapping[str, Any]) -> Setting:
        del config
        # The last synchronised weights and a momentum, both in FP32.
        outer = 8.0 if Options.from_dict(job.local_sgd).outer_momentum else 4.0
        return replace(plain, outer_bytes=outer)
