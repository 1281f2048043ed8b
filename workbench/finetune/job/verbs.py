"""Import a verb of a fine-tuning job on first use. The verbs are in `submit`, a higher room."""

from __future__ import annotations

import importlib
from typing import Any

from workbench.base import entries


def submit(module: str) -> Any:
    """Return a module of `submit`. Ranks need few of the modules."""
    return importlib.import_module(f"{entries.FINETUNE}.{module}")
