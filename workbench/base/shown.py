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


@singledispatch
def as_text(record: object) -> str:
    """Return a record as text, for a terminal."""
    return _view(as_text, record, repr)(record)


@singledispatch
def as_html(record: object) -> str:
    """Return a record as HTML to stand in a notebook."""
    return _view(as_html, record, lambda it: f"<pre>{html.escape(repr(it))}</pre>")(record)


@singledispatch
def as_page(record: object) -> str:
    """Return a record as a whole HTML page that needs no network."""
    return _view(as_page, record, lambda it: f"<!doctype html>{as_html(it)}")(record)


@singledispatch
def as_markdown(record: object) -> str:
    return _view(as_markdown, record, lambda it: f"```\n{as_text(it)}\n```\n")(record)


@singledispatch
def as_grid(record: object, limit: int | None = None) -> Grid:
    """Return a record as a table of at most so many rows."""
    return _view(as_grid, record, _no_view)(record, limit)


@singledispatch
def as_bundle(record: object) -> dict[str, object]:
    """Return what a notebook is sent of a record, by media type."""
    return _view(as_bundle, record, lambda it: {"text/plain": as_text(it), "text/html": as_html(it)})(record)


@singledispatch
def as_live(record: object, **options: object) -> None:
    """Display a record in a notebook and keep it up to date; what its options are, its drawing says."""
    _view(as_live, record, _no_view)(record, **options)


@singledispatch
def as_error(error: BaseException) -> list[str]:
    """Return the lines by which a notebook shows an error that ended a cell."""
    return _view(as_error, error, lambda it: traceback.format_exception(it))(error)


@singledispatch
def follow(record: object) -> AbstractContextManager[Callable[..., None]]:
    """Return a context whose value draws how far a record is, each time that it is called."""
    return _view(follow, record, lambda _: nullcontext(_draw_nothing))(record)


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


def _view(view: _SingleDispatchCallable[T], record: object, otherwise: Callable[..., T]) -> Callable[..., T]:
    load_views()
    drawing = view.dispatch(type(record))
    return otherwise if drawing is view.dispatch(object) else drawing


def _draw_nothing(*_: object) -> None:
    pass


def _no_view(record: object, *_: object, **__: object) -> Any:
    raise NotImplementedError(f"no view of {type(record).__name__} is at hand")
