"""The fields and buttons of the form: one widget, which holds what is chosen and says what was clicked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from workbench.client.compose.composition import Composition
from workbench.client.compose.fields import FIELDS, SECTIONS, FormField
from workbench.display.kit.buttons import heard_at_once


def make_fields(
    composition: Composition, on_choice: Callable[[Mapping[str, Any]], None], on_click: Callable[[str], None]
) -> Any:
    """Make the widget; it hears clicks while a cell runs, too."""
    widget = _widget_class()(
        fields=[_as_json(field) for field in FIELDS.values()], sections=list(SECTIONS), values=dict(composition)
    )
    heard_at_once(widget)
    widget.observe(lambda change: on_choice(change["new"]), "values")
    widget.on_msg(lambda _widget, content, _buffers: on_click(str(content.get("action"))))
    return widget


def _as_json(field: FormField) -> dict[str, Any]:
    names = ("name", "label", "kind", "section", "is_main", "needs", "values", "choices", "proposals", "hint")
    return {**{name: getattr(field, name) for name in names}, "meaning": field.option.help.replace("`", "")}


@cache
def _widget_class() -> Any:
    """Make the class, whose library is loaded only where there is somebody to click."""
    import anywidget
    import traitlets as t

    templates = files("workbench.display").joinpath("templates")

    class Fields(anywidget.AnyWidget):
        _esm = templates.joinpath("compose.js").read_text(encoding="utf-8")
        _css = templates.joinpath("compose.css").read_text(encoding="utf-8")
        fields: Any = t.List().tag(sync=True)
        sections: Any = t.List().tag(sync=True)
        values = t.Dict().tag(sync=True)
        problems = t.Dict().tag(sync=True)
        state = t.Dict().tag(sync=True)

    return Fields
