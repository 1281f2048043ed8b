"""Where the trainer asks the technique: wrapping, clipping, the loss over ranks, saving. One class for each answer.

`TechniquePoints` serves techniques that leave it all to the library (`single`, `ddp`); the others override it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from workbench.jobs.adapters import LocalSgd
from workbench.jobs.choices import Communication, Precision, Technique
from workbench.jobs.finetune import FineTune
from workbench.worker.model import sharding
from workbench.worker.rank import collectives as ranks
from workbench.worker.standalone import send_in_bf16
from workbench.worker.train.local_sgd import ParameterAveraging


class TechniquePoints:
    """Answers of a technique that leaves everything to the library."""

    moves_model = True
    """Whether the Trainer moves the model to its device."""
    ranks_train_apart = False
    """Whether each rank follows its own loss, and ranks meet only now and then."""
    averaging: ParameterAveraging | None = None
    """Averages the weights of ranks that train apart; None under other techniques."""

    def __init__(self, job: FineTune | None = None) -> None:
        self._sends_bf16 = job is not None and job.communication == Communication.BF16

    def scaler(self, _device: torch.device) -> torch.amp.GradScaler | None:
        """Return a loss scaler of the technique's own; None leaves accelerate's in place."""
        return None

    def wrap(self, prepare: Callable[..., Any], model: Any, **options: Any) -> Any:
        """Return the model as it is trained; `prepare` is accelerate's way, which wraps it in DDP."""
        model = prepare(model, **options)
        return send_in_bf16(model) if self._sends_bf16 else model

    def clip(self, _trainer: Any, clip: Callable[[], Any]) -> Any:
        """Clip the gradients and return their norm before; `clip` is the library's way."""
        return clip()

    def norm(self, _trainer: Any, norm: Callable[[], Any]) -> Any:
        """Return the norm of the gradients, on the device; `norm` is the library's way."""
        return norm()

    def forward_is_collective(self, _trainer: Any) -> bool:
        """Return whether a forward pass needs every rank, since each holds a part of the weights."""
        return False

    def common_weights(self) -> AbstractContextManager[None]:
        """Hold the weights to evaluate and to save in the model; every rank must enter."""
        return nullcontext()

    def first_callbacks(self, _trainer: Any) -> Sequence[TrainerCallback]:
        """Return the callbacks that must run before all others."""
        return ()


class ZeroPoints(TechniquePoints):
    """Answers of DeepSpeed: its engine clips in its own step."""

    def clip(self, _trainer: Any, _clip: Callable[[], Any]) -> Any:
        return None

    def norm(self, trainer: Any, _norm: Callable[[], Any]) -> Any:
        # The library and accelerate would wait for the norm that the engine has left on its device.
        return trainer.deepspeed.get_global_grad_norm()

    def forward_is_collective(self, trainer: Any) -> bool:
        engine = getattr(trainer, "deepspeed", None)
        return (
            engine is not None
            and ranks.world_size() > 1
            and int(engine.zero_optimization_stage()) == 3
        )


class ShardedPoints(TechniquePoints):
    """Answers of FSDP: `fully_shard` has put the shards where they belong, and they stay there."""

    moves_model = False

    def __init__(self, job: FineTune) -> None:
        super().__init__(job)
        self._scales = job.precision == Precision.FP16

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        return sharding.ShardScaler(device.type) if self._scales else None

    def wrap(self, prepare: Callable[..., Any], model: Any, **_options: Any) -> Any:
        del prepare  # accelerate would refuse the shards, or wrap them in DDP
        return model

    def clip(self, trainer: Any, _clip: Callable[[], Any]) -> Any:
        if trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.unscale_(trainer.optimizer.optimizer)
        return sharding.clip_gradients(trainer.model, trainer.args.max_grad_norm)

    def forward_is_collective(self, _trainer: Any) -> bool:
        return ranks.world_size() > 1


class ApartPoints(TechniquePoints):
    """Answers of local SGD: ranks train apart, and their weights are averaged every few steps."""

    ranks_train_apart = True

    def __init__(self, job: FineTune) -> None:
        super().__init__(job)
        self._options = LocalSgd.from_dict(job.local_sgd)

    def wrap(self, prepare: Callable[..., Any], model: Any, **options: Any) -> Any:
        # accelerate prepares a model for evaluation as it does for training, but without DDP around it.
        return super().wrap(prepare, model, **{"evaluation_mode": True, **options})

    def common_weights(self) -> AbstractContextManager[None]:
        return self.averaging.averaged() if self.averaging is not None else nullcontext()

    def first_callbacks(self, trainer: Any) -> Sequence[TrainerCallback]:
        # The weights are on the trainer's device by now. The averages are taken before anything looks at a step.
        self.averaging = ParameterAveraging(trainer.model, self._options)
        return (self.averaging,)


def points_of(job: FineTune) -> TechniquePoints:
    """Return the answers of the job's technique."""
    technique = Technique(job.technique)
    if technique is Technique.FSDP:
        return ShardedPoints(job)
    if technique is Technique.LOCAL_SGD:
        return ApartPoints(job)
    if technique.uses_deepspeed:
        return ZeroPoints(job)
    return TechniquePoints(job)
