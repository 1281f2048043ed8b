"""The views that records ask to be drawn, which `display/` fills at the first look; without it, their plain repr."""

from __future__ import annotations

import html
import importlib
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, singledispatch
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _SingleDispatchCallable

    from workbench.base.table import Grid

T = TypeVar("T")


def _view(plain: Callable[..., T]) -> _SingleDispatchCallable[T]:
    """Return a function that draws a record by its class, and does what `plain` does where it has no drawing."""

    def draw(record: object, *args: object, **options: object) -> T:
        load_views()
        drawing = view.dispatch(type(record))
        return (plain if drawing is draw else drawing)(record, *args, **options)

    view = singledispatch(draw)
    return view


def _no_view(record: object, *_: object, **__: object) -> Any:
    raise NotImplementedError(f"no view of {type(record).__name__} is at hand")


def _draw_nothing(*_: object) -> None:
    pass


as_text = _view(repr)
"""Return a record as text, for a terminal."""

as_html = _view(lambda it: f"<pre>{html.escape(repr(it))}</pre>")
"""Return a record as HTML to stand in a notebook."""

as_page = _view(lambda it: f"<!doctype html>{as_html(it)}")
"""Return a record as a whole HTML page that needs no network."""

as_markdown = _view(lambda it: f"```\n{as_text(it)}\n```\n")

as_grid: _SingleDispatchCallable[Grid] = _view(_no_view)
"""Return a record as a table, of at most `limit` rows."""

as_bundle: _SingleDispatchCallable[dict[str, object]] = _view(
    lambda it: {"text/plain": as_text(it), "text/html": as_html(it)}
)
"""Return what a notebook is sent of a record, by media type."""

as_live: _SingleDispatchCallable[None] = _view(_no_view)
"""Display a record in a notebook and keep it up to date; what its options are, its drawing says."""

as_error = _view(lambda it: traceback.format_exception(it))
"""Return the lines by which a notebook shows an error that ended a cell."""

follow: _SingleDispatchCallable[AbstractContextManager[Callable[..., None]]] = _view(
    lambda _: nullcontext(_draw_nothing)
)
"""Return a context whose value draws how far a record is, each time that it is called."""


class Shown:
    """A record that people look at: text in a terminal, text and HTML in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def _repr_mimebundle_(self, **_include_exclude: object) -> dict[str, object]:
        return as_bundle(self)


class ShownLive(Shown):
    """A handle that a notebook shows live, with text and HTML where that cannot be."""

    __slots__ = ()

    def _ipython_display_(self) -> None:
        as_live(self)


@cache
def load_views() -> bool:
    """Fill the views; False where display/ cannot be imported."""
    try:
        importlib.import_module("workbench.display.views")
    except ImportError:
        return False
    return True
