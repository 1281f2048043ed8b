"""Local SGD: ranks train apart, and every few steps their weights are averaged.

The outer step is DiLoCo's (https://arxiv.org/abs/2311.08105, algorithm 1): SGD with Nesterov
momentum. Its gradient is the difference between the weights of the last synchronisation and the
mean of the ranks' weights. Every rank keeps its own optimizer states. Only pods import this module,
because the module loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from workbench.finetune.options.adapters import LocalSgd


class ParameterAveraging(TrainerCallback):  # type: ignore[misc]  # transformers publishes no types
    """Average the trained weights of all ranks every `sync_steps` steps and after the last step."""

    def __init__(self, model: Any, options: LocalSgd) -> None:
        """Start with the current weights as synchronised weights.

        All ranks have the same weights.
        """
        self._every = options.sync_steps
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._anchors = [p.detach().float().clone() for p in self._trained]
        self._outer = torch.optim.SGD(
            self._anchors,
            lr=options.outer_learning_rate,
            momentum=options.outer_momentum,
            nesterov=options.outer_momentum > 0,
        )
        self._apart = False

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        step = state.global_step
        synchronises = step % self._every == 0 or step >= state.max_steps
        self._apart = not synchronises
        if self._apart:
            return
        for anchor, mean in zip(self._anchors, self._means(), strict=True):
            anchor.grad = torch.sub(anchor, mean, out=mean)
        self._outer.step()
        self._outer.zero_grad()
        self._put(self._anchors)

    @property
    def apart(self) -> bool:
        """Whether the ranks' weights may differ."""
        return self._apart

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Average the weights, also if training was stopped between two synchronisations."""
        self.settle()

    def settle(self) -> None:
        """Set every rank's weights to the mean if the weights differ.

        Every rank must call this method.
        """
        if self._apart:
            self._put(self._means())
        self._apart = False

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean of the ranks' weights into the model temporarily; every rank must enter."""
        own = None
        if self._apart:
            own = [p.detach().clone() for p in self._trained]
        self.settle()
        yield
        if own is not None:
            self._put(own)
            self._apart = True

    def state(self) -> dict[str, object]:
        return {
            "anchors": self._anchors,
            "optimizer": self._outer.state_dict(),
            "apart": self._apart,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for anchor, saved in zip(self._anchors, state["anchors"], strict=True):
            anchor.copy_(saved)
        self._outer.load_state_dict(state["optimizer"])
        self._apart = state["apart"]

    def _means(self) -> Iterable[torch.Tensor]:
        # One message for all weights.
        flat = torch.cat([p.detach().float().flatten() for p in self._trained])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        sizes = [p.numel() for p in self._trained]
        parts = torch.split(flat, sizes)
        return [part.view_as(p) for part, p in zip(parts, self._trained, strict=True)]

    def _put(self, weights: Iterable[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self._trained, weights, strict=True):
                parameter.copy_(weight)
