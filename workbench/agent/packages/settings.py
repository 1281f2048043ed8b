"""Settings of pip that would lead an install of ours elsewhere. A host's pip.conf often has them.

Settings of the index, the network and the choice of versions stay as the host and the user have
them.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_PLACES = ("--no-user", "--target=", "--root=", "--report=")
"""Options of `pip install` that undo a host's settings. Options that follow count instead."""
_PLACES = ("PIP_PREFIX", "PIP_PYTHON", "PIP_REPORT", "PIP_ROOT", "PIP_TARGET")
_SWITCHED_OFF = (
    "PIP_DRY_RUN",
    "PIP_FORCE_REINSTALL",
    "PIP_IGNORE_INSTALLED",
    "PIP_QUIET",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_USER",
)


def without_places(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables for pip without a place of their own; a 0 also outranks a pip.conf."""
    kept = {name: value for name, value in env.items() if name not in _PLACES}
    return {**kept, **dict.fromkeys(_SWITCHED_OFF, "0")}
