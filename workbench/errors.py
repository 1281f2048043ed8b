"""The errors of the package, for `except`. All are below `WorkbenchError`."""

from __future__ import annotations

from workbench.base.errors import (
    BackendError,
    ConfigError,
    PodError,
    PodTimeout,
    RemoteError,
    RunError,
    RunFailed,
    WorkbenchError,
)

__all__ = [
    "BackendError",
    "ConfigError",
    "PodError",
    "PodTimeout",
    "RemoteError",
    "RunError",
    "RunFailed",
    "WorkbenchError",
]
