"""Import the verbs of a fine-tuning job on first use. The verbs are in `submit`, a higher room."""

from __future__ import annotations

import importlib
from typing import Any

from workbench.base import entries


def verbs() -> Any:
    """Return the module `submit.verbs`."""
    return importlib.import_module(entries.FINETUNE)
