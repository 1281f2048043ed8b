"""Hooks of a technique in a training step. The trainer calls a method for every decision.

`TechniquePoints` is for techniques that leave everything to the library; other techniques override
it. Functions on pods import torch locally.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class TechniquePoints:
    """Hooks of a technique that leaves everything to the library."""

    moves_model = True
    """Whether the Trainer moves the model to its device."""
    ranks_train_apart = False
    """Whether every rank follows its own loss, and ranks synchronise only now and then."""
    averaging: Any = None
    """Averaging of the weights of ranks that train apart; None under other techniques."""

    tensor: Any = None
    """Groups of ranks that share the weights of layers; None where each rank has whole weights."""

    def scaler(self, _device: Any) -> Any:
        """Return the technique's own loss scaler of fp16. None: accelerate's scaler is used."""
        return None

    def wrap(self, accelerator: Any, model: Any, **options: Any) -> Any:
        """Return the wrapped model. By itself, accelerate wraps a model in DDP."""
        return type(accelerator).prepare_model(accelerator, model, **options)

    def begin_micro_batch(self, model: Any, *, last: bool) -> None:
        """Prepare the model for a micro-batch; `last` is the last micro-batch of its step."""

    def clip(self, trainer: Any, model: Any) -> Any:
        """Clip the gradients and return their norm before clipping."""
        return trainer.clip_by_library(model)

    def norm(self, trainer: Any, model: Any, clipped: Any) -> Any:
        """Return the norm of the gradients, on the device. `clipped` is the norm from `clip`."""
        return trainer.norm_by_library(model, clipped)

    def common_weights(self) -> AbstractContextManager[None]:
        """Put the weights to evaluate and to save into the model.

        Every rank must enter the context.
        """
        return nullcontext()

    def first_callbacks(self, _trainer: Any) -> Sequence[Any]:
        """Return the callbacks that must run before all others."""
        return ()
