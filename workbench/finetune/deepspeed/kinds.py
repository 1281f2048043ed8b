"""Kinds of values in a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.base.errors import ConfigError, one_of, shortened
from workbench.base.json_values import as_float


@dataclass(frozen=True, slots=True)
class Kind:
    words: str
    fits: Callable[[object], bool]
    auto: bool = False
    """Whether the value may be 'auto', which the Trainer or DeepSpeed's default replaces."""
    null: bool = False

    def takes(self, value: object) -> bool:
        if self.auto and value == "auto":
            return True
        if self.null and value is None:
            return True
        return self.fits(value)

    def __str__(self) -> str:
        words = self.words
        if self.auto:
            words += ", or 'auto'"
        if self.null:
            words += ", or null"
        return words


Table = Mapping[str, "Kind | Table"]
"""Kind of the value by key; a table for an object with known keys."""


class Whole(dict[str, "Kind | Table"]):
    """Table of a section in which DeepSpeed refuses other keys.

    Other sections ignore unknown keys.
    """


def table_of(text: str) -> Whole:
    """Return a table from words: `[section.part]`, then `kind:` and keys.

    `[section]!` makes a `Whole`.

    Example:
        >>> part = table_of("count: a b [part] none/cpu,null: c")["part"]
        >>> {key: str(kind) for key, kind in part.items()}
        {'c': "one of 'none', 'cpu', or null"}
    """
    top = Whole()
    sections: list[dict[str, Kind | Table]] = [top]
    kind = KINDS["object"]
    for word in text.split():
        if word.startswith("["):
            sections = []
            for path in word.strip("[]!").split(","):
                section = Whole() if word.endswith("!") else {}
                sections.append(_opened(top, path, section))
        elif word.endswith(":"):
            name, *more = word.removesuffix(":").split(",")
            plain = KINDS.get(name) or _one_of(name)
            kind = replace(plain, auto="auto" in more, null="null" in more)
        else:
            for section in sections:
                section[word] = kind
    return top


def _opened(top: Whole, path: str, section: dict[str, Kind | Table]) -> dict[str, Kind | Table]:
    *within, name = path.split(".")
    table: dict[str, Any] = top
    for key in within:
        table = table.setdefault(key, {})
    table[name] = section
    return section


def _one_of(words: str) -> Kind:
    allowed = words.split("/")
    return Kind(
        "one of " + ", ".join(map(repr, allowed)),
        lambda value: _is_text(value) and value in allowed,
    )


def check_kinds(config: Mapping[str, object], table: Table, source: str, where: str = "") -> None:
    """Raise ConfigError for an unknown key, and for a value of the wrong kind."""
    for key, value in config.items():
        match table.get(key):
            case None:
                raise one_of(
                    f"{source}: key",
                    f"{where}{key}"[:_SHOWN],
                    sorted(where + name for name in table),
                )
            case Kind() as kind if not kind.takes(value):
                raise _refusal(source, f"{where}{key}", value, str(kind))
            case Mapping() as inner:
                match value:
                    case Mapping():
                        check_kinds(value, inner, source, f"{where}{key}.")
                    case None if (where, key) in _MAY_BE_NULL:
                        pass
                    case _:
                        raise _refusal(source, f"{where}{key}", value, "an object")


_SHOWN = 100  # most letters of a key in an error
_MAY_BE_NULL = {
    ("zero_optimization.", "offload_param"),
    ("zero_optimization.", "offload_optimizer"),
    ("zero_optimization.", "zenflow"),
    ("autotuning.", "model_info"),
}


def _refusal(source: str, key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{source}: {key} is {shortened(value)}; it must be {allowed}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    # DeepSpeed accepts 5e8, a float in JSON.
    amount = as_float(value)
    return amount is not None and amount.is_integer() and abs(amount) <= 2**63


def _at_least(least: float, value: object) -> bool:
    amount = as_float(value)
    return amount is not None and amount >= least


def _items(value: object) -> list[object]:
    """Return the items of a list; for another value, None alone, which is no text and no number."""
    return list(value) if isinstance(value, list | tuple) else [None]


KINDS = {
    "flag": Kind("true or false", lambda value: value is True or value is False),
    "whole": Kind("a whole number", _is_whole),
    "count": Kind(
        "a whole number, 0 or more", lambda value: _is_whole(value) and _at_least(0, value)
    ),
    "size": Kind(
        "a whole number, 1 or more", lambda value: _is_whole(value) and _at_least(1, value)
    ),
    "number": Kind("a number", lambda value: as_float(value) is not None),
    "positive": Kind("a number, 0 or more", lambda value: _at_least(0, value)),
    "share": Kind(
        "a number from 0 to 1",
        lambda value: _at_least(0, value) and not _at_least(1.0000001, value),
    ),
    "text": Kind("text", _is_text),
    "texts": Kind("a list of texts", lambda value: all(map(_is_text, _items(value)))),
    "numbers": Kind("a list of numbers", lambda value: None not in map(as_float, _items(value))),
    "object": Kind("an object", lambda value: isinstance(value, Mapping)),
}
"""Kinds by their words in a table."""
