"""Where the trainer asks the technique during a step. One class for each answer.

`TechniquePoints` serves techniques that leave everything to the library; the others override it.
What runs on pods imports torch inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class TechniquePoints:
    """Answers of a technique that leaves everything to the library."""

    moves_model = True
    """Whether the Trainer moves the model to its device."""
    ranks_train_apart = False
    """Whether each rank follows its own loss, and ranks meet only now and then."""
    averaging: Any = None
    """Averages the weights of ranks that train apart; None under other techniques."""

    def scaler(self, _device: Any) -> Any:
        """Return the technique's own loss scaler of fp16; None leaves accelerate's in place."""
        return None

    def wrap(self, prepare: Callable[..., Any], model: Any, **options: Any) -> Any:
        """Return the model as it is trained; `prepare` is accelerate's way, which wraps it in DDP."""
        return prepare(model, **options)

    def clip(self, _trainer: Any, clip: Callable[[], Any]) -> Any:
        """Clip the gradients and return their norm before; `clip` is the library's way."""
        return clip()

    def norm(self, _trainer: Any, norm: Callable[[], Any]) -> Any:
        """Return the norm of the gradients, on the device; `norm` is the library's way."""
        return norm()

    def common_weights(self) -> AbstractContextManager[None]:
        """Hold the weights to evaluate and to save in the model; every rank must enter."""
        return nullcontext()

    def first_callbacks(self, _trainer: Any) -> Sequence[Any]:
        """Return the callbacks that must run before all others."""
        return ()
