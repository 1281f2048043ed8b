"""Lion in plain tensor operations: the same update for whole weights, shards and flat buffers.

The Lion of bitsandbytes refuses the sharded tensors of FSDP. DeepSpeed's Lion needs a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation between momentum and gradient, with decoupled weight decay.

    https://arxiv.org/abs/2302.06675, algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        rate = group["lr"]
        beta1, beta2 = group["betas"]
        state = self.state[weight]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        momentum = state["exp_avg"]
        direction = momentum.lerp(weight.grad, 1 - beta1).sign_()
        weight.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        momentum.lerp_(weight.grad, 1 - beta2)
