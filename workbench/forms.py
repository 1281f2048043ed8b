"""The form for composing a cluster and a fine-tune."""

from __future__ import annotations

from workbench.display.compose.form import compose

__all__ = [
    "compose",
]
