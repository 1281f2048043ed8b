"""HTML by templates, which escape whatever they are given but `Markup`, and drop what a terminal would obey.

The style sheet `assets/sheet.css` confines every rule to `.wb`; colours are JupyterLab's if they are there.
"""

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

_BAD = "var(--jp-error-color1, #d32f2f)"
_BUSY = "var(--jp-brand-color1, #1976d2)"
_STATE_COLOURS = {
    "succeeded": "var(--jp-success-color1, #2e7d32)",
    "failed": _BAD,
    "lost": _BAD,
    "cancelled": "var(--jp-warn-color1, #c77700)",
    "queued": "var(--jp-ui-font-color3, #888)",
}


def render(name: str, **values: object) -> Markup:
    return Markup(_environment().get_template(name).render(values))


def styled(content: str, state: str = "", *, full: bool = False, sheet: bool = True) -> str:
    """Put HTML into the frame that the style sheet speaks of, with the sheet unless the page has it."""
    colour = _STATE_COLOURS.get(state, _BUSY)
    return str(render("frame.html", content=Markup(content), colour=colour, full=full, sheet=sheet))


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
    environment.filters["lines"] = _lines
    environment.filters["key"] = _key
    environment.filters["source"] = _source
    return environment


def _lines(text: str) -> Markup:
    lines = text.split("\n")
    return escape("\n".join(" " * (len(line) - len(line.lstrip(" "))) + plain(line) for line in lines))


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
