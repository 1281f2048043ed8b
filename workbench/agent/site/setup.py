"""Variables that the setup lines of a host have set, from the file that the place wrote."""

from __future__ import annotations

from pathlib import Path

from workbench.agent.ranks.records import read_record
from workbench.base.process import SETUP_FILE


def setup_variables(root: Path) -> dict[str, str]:
    """Return the variables for the processes of a pod; none without setup lines."""
    found = read_record(root / SETUP_FILE) or {}
    return {name: text for name, text in found.items() if isinstance(text, str)}
