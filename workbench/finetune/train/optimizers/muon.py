"""Muon for the matrices of the hidden layers and AdamW for other weights, in one optimizer.

The arithmetic of a matrix is that of `torch.optim.Muon`. Under ZeRO 1 and 2 a rank updates a part
of the concatenated matrices; ranks exchange only matrices that a border between parts cuts.
DeepSpeed's own Muon clips after the orthogonalization, so its losses differ from a single rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

_COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
MATRICES = "matrices"
"""Key of a group that Muon updates: the shapes of its weights, in order."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups with the key `matrices`, torch's AdamW for the other groups."""

    def __init__(self, matrices: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
        # The groups of both are the same objects: schedules and DeepSpeed change them in place.
        self._adamw = torch.optim.AdamW(others, fused=True)
        for group in matrices:
            group[MATRICES] = [tuple(weight.shape) for weight in group["params"]]
        # accelerate reads the default rate for a scheduler of DeepSpeed.
        super().__init__([*matrices, *self._adamw.param_groups], {"lr": matrices[0]["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A restored state has other groups. DeepSpeed steps with one group at a time.
        self._adamw.param_groups = [group for group in self.param_groups if MATRICES not in group]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            if MATRICES in group:
                self._update_matrices(group)
        return loss

    def _update_matrices(self, group: dict[str, Any]) -> None:
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = state["momentum_buffer"]
            momentum.lerp_(weight.grad, 1 - group["momentum"])
            update = weight.grad.lerp(momentum, group["momentum"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            if weight.dim() == 1:
                _update_part(weight, update, group)
            else:
                _update_matrix(weight, update, group)


class _Place(NamedTuple):
    """Place of a matrix in the concatenation of all matrices."""

    shape: tuple[int, int]
    start: int
    end: int


def _update_matrix(weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
    rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], weight.shape)
    weight.add_(_orthogonal(update), alpha=-rate)


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    return _zeropower_via_newtonschulz(update, _COEFFICIENTS, DEFAULT_NS_STEPS, EPS)


def _update_part(weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> None:
    """Update a rank's part of the concatenated matrices; every rank calls the function."""
    size = weight.numel()
    first = size * (dist.get_rank() if dist.is_initialized() else 0)
    for shape, start, end in _places(group[MATRICES]):
        # The matrix's elements on this rank, none if `low` is not below `high`.
        low = max(start, first)
        high = min(end, first + size)
        mine = slice(low - first, high - first)
        if start // size != (end - 1) // size:
            # Ranks have different elements of the matrix, so the sum is the matrix.
            whole = update.new_zeros(end - start)
            if low < high:
                whole[low - start : high - start] = update[mine]
            dist.all_reduce(whole)
        elif low < high:
            whole = update[mine]
        if low < high:
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], torch.Size(shape))
            moved = _orthogonal(whole.view(shape)).reshape(-1)
            weight[mine].add_(moved[low - start : high - start], alpha=-rate)


def _places(shapes: Any) -> Iterator[_Place]:
    start = 0
    for rows, columns in shapes:
        end = start + rows * columns
        yield _Place((rows, columns), start, end)
        start = end
