"""Read the fields of a message of the keeper's; a wrong one is a ValueError that names it."""

from __future__ import annotations

from collections.abc import Mapping

Message = Mapping[str, object]


def object_in(message: Message, name: str) -> Message:
    """Return a field that is an object; an empty one where it is missing."""
    value = message.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{name} must be an object")
    return value or {}


def texts_in(message: Message, name: str) -> dict[str, str]:
    """Return a field that is an object of texts, without showing a value of it."""
    values = object_in(message, name)
    if {type(text) for text in values.values()} - {str}:
        raise ValueError(f"{name} must map strings to strings")
    return {key: str(text) for key, text in values.items()}


def whole_in(message: Message, name: str, default: int | None = None) -> int:
    """Return a field that is a whole number, 0 or more."""
    value = message.get(name, default)
    if not isinstance(value, int) or value is True or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
    return value


def number_in(message: Message, name: str, default: float) -> float:
    value = message.get(name, default)
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    return float(value)
