"""Views for drawing records. Without a drawing, a record shows its plain repr.

`workbench/__init__.py`, above all rooms, names the module with the drawings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import singledispatch
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _SingleDispatchCallable

T = TypeVar("T")
Draw = Callable[..., None]
"""Function that draws the progress of a record now; the values are those of its own view."""


def view(plain: Callable[..., T]) -> _SingleDispatchCallable[T]:
    """Return a function that draws a record by its class, with `plain` as the fallback."""

    def draw(record: object, *args: object, **options: object) -> T:
        load_views()
        drawing = by_class.dispatch(type(record))
        return (plain if drawing is draw else drawing)(record, *args, **options)

    by_class = singledispatch(draw)
    return by_class


def no_view(record: object, *_: object, **__: object) -> Any:
    """Refuse to draw; a fallback for views without a plain form."""
    raise NotImplementedError(f"no view of {type(record).__name__} is at hand")


def _plain_html(record: object) -> str:
    import html

    return f"<pre>{html.escape(repr(record))}</pre>"


def _plain_traceback(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception(error)


def _draw_nothing(*_: object) -> None:
    pass


as_text = view(repr)
"""Return a record as text, for a terminal."""

as_html = view(_plain_html)
"""Return a record as HTML for a notebook."""

as_page = view(lambda it: f"<!doctype html>{as_html(it)}")
"""Return a record as a complete HTML page without network access."""

as_markdown = view(repr)
"""Return a record as Markdown, for the model hub."""

as_bundle: _SingleDispatchCallable[dict[str, object]] = view(
    lambda it: {"text/plain": as_text(it), "text/html": as_html(it)}
)
"""Return the notebook's data of a record, by media type."""

as_live: _SingleDispatchCallable[None] = view(no_view)
"""Display a record in a notebook and keep it current; options depend on the record's view."""

as_error = view(_plain_traceback)
"""Return the lines of an error that ended a notebook's cell."""

follow: _SingleDispatchCallable[AbstractContextManager[Draw]] = view(
    lambda _: nullcontext(_draw_nothing)
)
"""Return a context; its value draws the progress of a record on every call."""


class Displayable:
    """A record for people: text in a terminal, text and HTML in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def _repr_mimebundle_(self, **_include_exclude: object) -> dict[str, object]:
        return as_bundle(self)


class LiveDisplayable(Displayable):
    """A handle that a notebook shows live, with text and HTML as the fallback."""

    __slots__ = ()

    def _ipython_display_(self) -> None:
        as_live(self)


class _Drawings:
    """The module with the drawings, and whether it could be imported."""

    module = ""
    loaded: bool | None = None


def draw_with(module: str) -> None:
    """Set the module that fills the views when it is imported, at the first drawing."""
    _Drawings.module = module
    _Drawings.loaded = None


def load_views() -> bool:
    """Fill the views once. Return False if the drawings cannot be imported."""
    if _Drawings.loaded is None and _Drawings.module:
        try:
            import_module(_Drawings.module)
        except ImportError:
            _Drawings.loaded = False
        else:
            _Drawings.loaded = True
    return bool(_Drawings.loaded)
