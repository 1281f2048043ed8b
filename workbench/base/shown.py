"""Records do not draw themselves: `Shown` asks a table of views, which `display/views.py` fills at the first look.

That import is the one place where a lower room reaches a higher one, by name and late. Where display/ cannot be
imported, a record shows its plain repr.
"""

from __future__ import annotations

import html
import importlib
from functools import cache, singledispatch

__all__ = ["Shown", "ShownLive", "as_html", "as_live", "as_markdown", "as_page", "as_text"]


@singledispatch
def as_text(record: object) -> str:
    """Return a record as text, for a terminal."""
    return repr(record)


@singledispatch
def as_html(record: object) -> str:
    """Return a record as HTML to stand in a notebook."""
    return f"<pre>{html.escape(repr(record))}</pre>"


@singledispatch
def as_page(record: object) -> str:
    """Return a record as a whole HTML page that needs no network and no script."""
    return f"<!doctype html>{as_html(record)}"


@singledispatch
def as_markdown(record: object) -> str:
    """Return a record as Markdown."""
    return f"```\n{as_text(record)}\n```\n"


@singledispatch
def as_live(record: object) -> None:
    """Put a record before the eyes of a notebook's user and keep it up to date; NotImplementedError where it cannot."""
    raise NotImplementedError


class Shown:
    """A record that people look at: text in a terminal, text and HTML in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        load_views()
        return as_text(self)

    def _repr_html_(self) -> str:
        load_views()
        return as_html(self)

    def _repr_mimebundle_(self, **_include_exclude: object) -> dict[str, object]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


class ShownLive(Shown):
    """A handle that a notebook shows live, with text and HTML where that cannot be."""

    __slots__ = ()

    def _ipython_display_(self) -> None:
        load_views()
        as_live(self)


@cache
def load_views() -> bool:
    """Fill the table of views; False where display/ cannot be imported."""
    try:
        importlib.import_module("workbench.display.views")
    except ImportError:
        return False
    return True
