"""Optimizers that neither torch nor transformers has for every technique."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workbench.finetune.job.finetune import FineTune
from workbench.finetune.model.layers import hidden_matrices
from workbench.finetune.options.optimizers import LionOptions, MuonOptions
from workbench.finetune.train.optimizers.lion import Lion
from workbench.finetune.train.optimizers.muon import MuonAdamW

Make = Callable[[Any, set[str]], torch.optim.Optimizer]
"""Function that makes an optimizer from a model and the names of its decaying weights."""


def maker(job: FineTune) -> Make | None:
    """Return the function that makes the job's optimizer; None if a library makes it."""
    makers = {"lion": _lion, "muon": _muon}
    make = makers.get(job.optimizer)
    return None if make is None else partial(make, job)


def _lion(job: FineTune, model: Any, decays: set[str]) -> torch.optim.Optimizer:
    options = LionOptions.from_dict(job.optimizer_options)
    assert job.learning_rate is not None
    return Lion(
        _groups(job, model, decays, but=set()),
        lr=job.learning_rate,
        betas=(options.beta1, options.beta2),
    )


def _muon(job: FineTune, model: Any, decays: set[str]) -> torch.optim.Optimizer:
    options = MuonOptions.from_dict(job.optimizer_options)
    matrices = hidden_matrices(model)
    others = _groups(job, model, decays, but={id(weight) for weight in matrices})
    for group in others:
        group["lr"] = options.adam_learning_rate or job.learning_rate
        group["betas"] = (job.adam_beta1, job.adam_beta2)
        group["eps"] = job.adam_epsilon
    of_muon = {
        "params": matrices,
        "lr": job.learning_rate,
        "momentum": options.momentum,
        "weight_decay": job.weight_decay,
        "adjust_lr_fn": str(options.adjust_lr_fn),
    }
    return MuonAdamW([of_muon], others)


def _groups(job: FineTune, model: Any, decays: set[str], *, but: set[int]) -> list[dict[str, Any]]:
    """Return the trained weights with and without decay, without the ids `but`."""
    groups: dict[float, list[Any]] = {float(job.weight_decay): [], 0.0: []}
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) not in but:
            groups[float(job.weight_decay) if name in decays else 0.0].append(weight)
    return [
        {"params": weights, "weight_decay": decay} for decay, weights in groups.items() if weights
    ]
