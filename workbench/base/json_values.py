"""Read values out of JSON that nobody vouches for: of another version, cut short, or written by hand. Pure.

What is not of the kind that is wanted counts as not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["Json", "number", "part", "text", "whole"]

Json = Mapping[str, object]


def part(data: Json, name: str) -> Json:
    """Return an object within an object; an empty one where it is none."""
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def text(value: object) -> str:
    """Return a text; an empty one for what is none."""
    return value if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """Return a finite number; None for what is none."""
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if finite else None  # type: ignore[arg-type]


def whole(value: object) -> int | None:
    """Return a whole number; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
