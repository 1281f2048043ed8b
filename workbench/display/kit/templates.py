"""HTML by templates, which escape whatever they are given but `Markup`, and drop what a terminal would obey."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from workbench.base.table import Key
from workbench.base.words import middle_cut, plain
from workbench.display.kit.logs import clean

if TYPE_CHECKING:
    from jinja2 import Environment


def render(name: str, **values: object) -> Markup:
    return Markup(_environment().get_template(name).render(values))


def macro(template: str, name: str) -> Callable[..., Markup]:
    """Return a macro of a template, to be called with its arguments."""
    drawing: Callable[..., Markup] = getattr(_environment().get_template(template).module, name)
    return drawing


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("workbench.display"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = lambda text: escape(plain(text))
    environment.filters["middle_cut"] = lambda text: escape(middle_cut(plain(text)))
    environment.filters["lines"] = lambda text: escape("\n".join(map(_indented, text.split("\n"))))
    environment.filters["key"] = _key
    environment.filters["source"] = _source
    return environment


def _indented(line: str) -> str:
    return " " * (len(line) - len(line.lstrip(" "))) + plain(line)


def _key(value: Key) -> str:
    match value:
        case str():
            return plain(value)
        case None:
            return ""
    return f"{value:.12g}"


def _source(name: str) -> str:
    """Return what a Content Security Policy calls a script of ours."""
    return f"'sha256-{b64encode(hashlib.sha256(render(name).encode()).digest()).decode()}'"
