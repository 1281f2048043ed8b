"""Where children of this process find this very package: the folder, or the zip, that it was imported from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["HOME", "child_environment", "import_path"]

HOME = str(Path(__file__).absolute().parents[2])
"""What holds the package `workbench`."""


def import_path(rest: str | None = None) -> str:
    """Return a PYTHONPATH on which this package comes first, then what `rest` names."""
    return f"{HOME}{os.pathsep}{rest}" if rest else HOME


def child_environment(**more: str) -> Mapping[str, str]:
    """Return this process's environment with this package first on the import path, and `more` in it."""
    return {**os.environ, "PYTHONPATH": import_path(os.environ.get("PYTHONPATH")), **more}
