"""The environment variables that a user sets for ranks and pods, and the refusal of bad values."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping

from workbench.base.errors import ConfigError, one_of, shortened

SAVE_EVERY_S = "WORKBENCH_SAVE_EVERY_S"
"""Seconds between two checkpoints by time."""
WARM_MODULES = "WORKBENCH_WARM_MODULES"
"""Names of the modules that a warm process imports, separated by commas."""
_PREFIX = "WORKBENCH_"
_ALLOWED = {
    SAVE_EVERY_S: "a number of seconds above 0, such as '1800'",
    WARM_MODULES: "names of modules separated by commas, such as 'torch,datasets'",
}


def check_settings(env: Mapping[str, str], *, known: Collection[str] | None = None) -> None:
    """Raise ConfigError for a setting with a bad value.

    A value with a reference such as `${NAME}` passes. `known`: variables that may stand beside the
    settings; any other name with our prefix is refused. None: names are not checked.

    Example:
        >>> check_settings({"WORKBENCH_SAVE_EVERY_S": "1800", "NCCL_DEBUG": "INFO"})
    """
    for name, text in env.items():
        if name in _ALLOWED:
            if "${" not in text and not _fits(name, text):
                raise ConfigError(f"env {name} is {shortened(text)}; it must be {_ALLOWED[name]}")
        elif known is not None and name.startswith(_PREFIX) and name not in known:
            raise one_of("env variable", name, _ALLOWED)


def setting(name: str) -> str:
    """Return the value of a setting in this process, empty if unset. Raises ConfigError."""
    text = os.environ.get(name, "")
    if text:
        check_settings({name: text})
    return text


def _fits(name: str, text: str) -> bool:
    if name == WARM_MODULES:
        return all(part.isidentifier() for part in text.replace(",", ".").split("."))
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
