"""HTML by templates, which escape whatever they are given but `Markup`, and drop what a terminal would obey."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from workbench.base.words import plain
from workbench.display.kit.logs import clean

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["Markup", "macro", "render"]


def render(name: str, **values: object) -> Markup:
    """Fill in a template."""
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
    return environment
