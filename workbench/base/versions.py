"""What is installed beside this Python, looked up without importing it."""

from __future__ import annotations

import importlib.metadata
import platform

import workbench

__all__ = ["PACKAGES", "installed_versions"]

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
"""The packages that all pods must have in the same versions."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of each of `PACKAGES` that is there."""
    found = {"python": platform.python_version(), "workbench": workbench.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
