"""Values that do not belong where they stand, and how to put one into any place of a JSON value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WRONG: tuple[object, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1.5,
        1e308,
        10**400,
        2**63,
        10**30,
        "",
        "x" * 5000,
        "\ud800",
        "a\0b",
        "\x1b[31m",
    ),
    *(
        "/dev/zero",
        "~no/x",
        "${HOME}",
        "auto",
        [],
        {},
        [[]],
        {"a": [1]},
        ["x", 1, None],
        float("nan"),
        float("-inf"),
    ),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within a value, itself first."""
    yield at
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in pairs:
        yield from places(inner, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: object) -> Any:
    """A copy of a value with another one in one place."""
    if not at:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(copy[at[0]], at[1:], by)
    return copy


def inner(value: Any, at: tuple[Any, ...]) -> Any:
    """What stands in a place."""
    return inner(value[at[0]], at[1:]) if at else value
