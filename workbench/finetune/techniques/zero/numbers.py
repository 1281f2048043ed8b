"""Numbers of a DeepSpeed JSON, for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.base.errors import ConfigError


def number_of(section: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number of a section below `zero_optimization`.

    Raises:
        ConfigError: The value is not a number.
    """
    value = section.get(key, default)
    if value == "auto":
        # The Trainer sets a small number.
        return 1_000_000
    if isinstance(value, str):
        return default
    if isinstance(value, int | float):
        return int(value)
    raise ConfigError(f"deepspeed zero_optimization.{key} is {value!r}; it must be a number")
