"""Weights that are one tensor under several names, such as tied embeddings.

A change of one name alone would be lost, or would change the other, when the model is saved as a
whole. Code that trains a part of a model asks here first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.base.errors import ConfigError

Owners = Mapping[str, frozenset[str]]
"""All names of a weight, by each of the names. Weights of one name are left out."""


def tied_weights(model: Any) -> Owners:
    """Return the weights of a model that have several names."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    owners: dict[str, frozenset[str]] = {}
    for group in names.values():
        if len(group) > 1:
            owners.update(dict.fromkeys(group, frozenset(group)))
    return owners


def check_alone(weights: Iterable[str], owners: Owners, what: str) -> None:
    """Raise ConfigError if a weight has another name; `what` begins the message."""
    for weight in sorted(weights):
        others = owners.get(weight, frozenset()) - {weight}
        if others:
            module = weight.rpartition(".")[0]
            raise ConfigError(
                f"{what} {module!r}, and its weight is also {min(others)!r} (tied embeddings); "
                "trained apart, a merged or saved model would be another model. Drop the "
                "name, or train all weights with peft='none'"
            )
