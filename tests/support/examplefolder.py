"""The folder of one example of hypothesis: `tmp_path` is the same for all examples of a test."""

from __future__ import annotations

import os
import tempfile


def example_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder where those of pytest lie, in memory if there is room."""
    return tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
