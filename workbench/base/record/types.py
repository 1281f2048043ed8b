"""Types of options: a size, a text, an environment, and annotations on allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from workbench.base.errors import ConfigError
from workbench.base.settings import check_settings


@dataclass(frozen=True, slots=True)
class Allowed:
    """Annotation with the allowed values in words, where the type alone is unclear."""

    words: str


@dataclass(frozen=True, slots=True)
class Exists:
    """Annotation of a path on this machine: a user's call is refused without the file or folder."""

    unless: str = "://"
    """Text in values that are no path here, such as addresses."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Part of a type: what a number counts."""

    name: str


# Linux starts no program with a longer variable: MAX_ARG_STRLEN, with name, = and a NUL.
_LONGEST_VARIABLE = 128 << 10
_VARIABLES = TypeAdapter(Mapping[str, str], config=ConfigDict(strict=True))


def _environment(value: Any) -> object:
    """Refuse an invalid environment, without showing its values."""
    try:
        bad = next((name for name in value if not str(name).isidentifier()), None)
        _VARIABLES.validate_python(value)
        problem = (
            f"has the name {bad!r}; a name is letters, digits and _, no digit first"
            if bad is not None
            else ""
        )
    except TypeError:
        problem = "must be an object of strings, NAME: value"
    except ValidationError as error:
        place = error.errors(include_input=False)[0]["loc"]
        problem = (
            f"{place[0]} is not a string; quote it"
            if place
            else "must be an object of strings, NAME: value"
        )
    if not problem:
        problem = _too_long(value)
    if problem:
        raise ConfigError(f"env {problem}")
    check_settings(value)
    return value


def _too_long(variables: Mapping[str, str]) -> str:
    """Return a sentence on the first variable with which no program starts; empty: none."""
    for name, text in variables.items():
        size = len(f"{name}={text}".encode(errors="surrogatepass")) + 1
        if size > _LONGEST_VARIABLE:
            return (
                f"{name} has {size} bytes, and Linux takes {_LONGEST_VARIABLE}; "
                "write the value into a file, and give the path"
            )
    return ""


Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int | float, Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, PurePath) else value)
]
Environment = Annotated[Mapping[str, str], BeforeValidator(_environment)]
