"""Read values out of JSON that nobody vouches for: of another version, cut short, or written by hand. Pure.

What is not of the kind that is wanted counts as not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["Json", "items", "number", "part", "parts", "text", "whole"]

Json = Mapping[str, object]
_LARGEST = 2**63  # SQLite, TensorBoard and arrays take no larger whole number


def part(data: Json, name: str) -> Json:
    """Return an object within an object; an empty one where it is none."""
    match data.get(name):
        case Mapping() as value:
            return value
    return {}


def items(value: object) -> list[object]:
    """Return what a list holds; nothing where it is none."""
    match value:
        case [*several]:
            return several
    return []


def parts(value: object) -> list[Json]:
    """Return the objects of a list; none where it is no list."""
    objects: list[Json] = []
    for one in items(value):
        match one:
            case Mapping():
                objects.append(one)
    return objects


def text(value: object) -> str:
    """Return a text; an empty one for what is none."""
    match value:
        case str():
            return value
    return ""


def number(value: object) -> float | None:
    """Return a finite number; None for what is none."""
    match value:
        case bool():
            return None
        case int() if abs(value) < _LARGEST:
            return float(value)
        case float() if math.isfinite(value):
            return value
    return None


def whole(value: object) -> int | None:
    """Return a whole number of 64 bits; None for what is none."""
    match value:
        case bool():
            return None
        case int() if abs(value) < _LARGEST:
            return value
    return None
