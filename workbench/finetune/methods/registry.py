"""List of all methods, in the order of the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from workbench.base.errors import one_of
from workbench.base.json_values import get_object
from workbench.finetune.methods.dpo import DPO
from workbench.finetune.methods.grpo import GRPO
from workbench.finetune.methods.kto import KTO
from workbench.finetune.methods.method import Method
from workbench.finetune.methods.orpo import ORPO
from workbench.finetune.methods.reward import Reward
from workbench.finetune.methods.sft import SFT

METHODS: Sequence[Method] = (SFT(), DPO(), KTO(), ORPO(), Reward(), GRPO())
_BY_NAME = {method.name: method for method in METHODS}
MethodName = Literal["sft", "dpo", "kto", "orpo", "reward", "grpo"]
"""Names of all methods, which an editor completes; a test compares both."""


def method_of(name: str) -> Method:
    """Return the method with the given name.

    Raises:
        ConfigError: No method has the name.
    """
    if name not in _BY_NAME:
        raise one_of("method", name, list(_BY_NAME))
    return _BY_NAME[name]


def repeats(name: object) -> bool:
    """Return whether a run of the method can be repeated without the project."""
    method = _BY_NAME.get(str(name))
    return method is not None and method.recipe


def method_words(options: Mapping[str, object]) -> str:
    """Return method and options from a job's JSON form of any version; empty for answers alone.

    Example:
        >>> method_words({"method": "dpo", "method_options": {"beta": 0.2}}), method_words({})
        ('dpo, beta 0.2', '')
    """
    method = _BY_NAME.get(str(options.get("method")))
    if method is None or not method.uses_trl:
        return ""
    given = [f"{name} {value}" for name, value in get_object(options, "method_options").items()]
    return ", ".join([method.name, *given])
