"""What is installed beside this Python, looked up without importing it."""

from __future__ import annotations

__all__ = ["PACKAGES", "VERSION", "installed_versions"]

VERSION = "0.1.0"

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
"""The packages that all pods must have in the same versions."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of each of `PACKAGES` that is there."""
    import importlib.metadata
    import platform

    versions = {"python": platform.python_version(), "workbench": VERSION}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
