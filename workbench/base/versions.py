"""Packages beside a process's Python, found without importing them.

Standard library, no import of this package: the text also travels to hosts.
"""

from __future__ import annotations

import glob
import sys

VERSION = "0.1.0"

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets")
"""Packages with equal versions on all pods."""


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of all installed `PACKAGES`."""
    versions = {"python": sys.version.split()[0].rstrip("+"), "workbench": VERSION}
    by_name: dict[str, str] = {}
    for folder in sys.path:
        # `glob` finds nothing in an archive, or in a folder that is missing or closed.
        for entry in glob.glob("*.dist-info", root_dir=folder or "."):  # noqa: PTH207 (names)
            name, _, version = entry.removesuffix(".dist-info").partition("-")
            by_name.setdefault(name.lower(), version)
    for package in PACKAGES:
        if version := by_name.get(package) or _described(package):
            versions[package] = version
    return versions


def _described(package: str) -> str:
    """Return the version of a package from another source than a wheel, or ""."""
    import importlib.metadata  # not at the top: this also loads email

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
