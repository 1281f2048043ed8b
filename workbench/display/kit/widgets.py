"""Widgets that are a script of ours, and values that page and kernel share."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"


def make_widget(name: str, **values: object) -> Any:
    """Make the widget of a script in `templates/assets`, with its style sheet; its library is loaded only here."""
    import anywidget
    import traitlets

    templates = files("workbench.display").joinpath("templates/assets")
    style = templates.joinpath(f"{name}.css")
    parts: dict[str, object] = {name: traitlets.Any(value).tag(sync=True) for name, value in values.items()}
    parts["_esm"] = templates.joinpath(f"{name}.js").read_text(encoding="utf-8")
    if style.is_file():
        parts["_css"] = style.read_text(encoding="utf-8")
    widget = type(name, (anywidget.AnyWidget,), parts)()
    heard_at_once(widget)
    return widget


def heard_at_once(widget: Any) -> None:
    """Let clicks on a widget be heard while a cell runs, a waiting one above all."""
    comm: Any = getattr(widget, "comm", None)
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, asked: asked


def widget_bundle(widget: Any, words: str) -> dict[str, object]:
    """Return a widget as a notebook takes it, with the words for where there are none."""
    return {"text/plain": words, VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}
