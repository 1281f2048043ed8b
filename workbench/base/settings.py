"""The environment variables of ours that a user sets, and the refusal of bad values."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping

from workbench.base.errors import ConfigError, one_of, shortened

SAVE_EVERY_S = "WORKBENCH_SAVE_EVERY_S"
"""Seconds between two checkpoints by time."""
_PREFIX = "WORKBENCH_"


def check_settings(env: Mapping[str, str], *, known: Collection[str] | None = None) -> None:
    """Raise ConfigError for a setting with a bad value. A value with `${NAME}` passes.

    `known`: variables beside the settings. Any other name with our prefix is refused, as nothing
    reads the variable. None: names are not checked.
    """
    for name, text in env.items():
        if name == SAVE_EVERY_S:
            if "${" not in text:
                _seconds(name, text)
        elif known is not None and name.startswith(_PREFIX) and name not in known:
            raise one_of("env variable", name, [SAVE_EVERY_S])


def setting_s(name: str, default: float) -> float:
    """Return the seconds of a setting in this process. Raises ConfigError."""
    text = os.environ.get(name)
    return _seconds(name, text) if text else default


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"env {name} is {shortened(text)}; it must be a number of seconds above 0"
        )
    return seconds
