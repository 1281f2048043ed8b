"""Display live records: widgets, replaced by HTML in the end as a saved notebook cannot show them again; else text."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from workbench.display.kit.doc import Doc, to_bundle
from workbench.display.kit.line import is_notebook

__all__ = ["WIDGET", "Live", "LivePanel", "has_widgets", "heard_at_once"]

logger = logging.getLogger(__name__)
WIDGET = "application/vnd.jupyter.widget-view+json"


class InFolder(Protocol):
    """A record that has a directory of its own."""

    @property
    def path(self) -> Path: ...


class LivePanel(Protocol):
    """Widgets that keep themselves up to date in a thread of their own."""

    widget: Any

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether the user has something open in it that plain HTML would take away."""
        ...

    def start(self) -> object:
        """Begin to follow, unless that is done already."""
        ...


def has_widgets() -> bool:
    """Whether this process is a notebook's kernel and can make widgets."""
    return is_notebook(sys.stdout) and importlib.util.find_spec("ipywidgets") is not None


def heard_at_once(widget: Any) -> Any:
    """Let clicks on a widget and those inside it be heard while a cell runs, a waiting one above all; return it."""
    comm = getattr(widget, "comm", None)
    if comm is not None and hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda _data, asked: asked
    for child in getattr(widget, "children", ()):
        heard_at_once(child)
    return widget


class Live:
    """The panels of one kind of record: one for each directory, however often it is displayed."""

    def __init__(self, doc: Callable[[Any], Doc]):
        self._doc = doc
        self._panels: dict[Path, LivePanel] = {}
        self._displays: dict[Path, list[str]] = {}
        self._lock = threading.Lock()

    def bundle(self, record: InFolder, make: Callable[[], LivePanel] | None) -> dict[str, object]:
        """Return a display bundle: text and HTML always, and the panel where one is wanted."""
        path, bundle = record.path, to_bundle(self._doc(record))
        if make is not None:
            with self._lock:
                panel = self._panels.get(path) or make()
                self._panels[path] = panel
            heard_at_once(panel.widget)
            panel.start()
            bundle[WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": panel.widget.model_id}
        return bundle

    def show(self, record: InFolder, make: Callable[[], LivePanel] | None, *, keep: bool = False) -> None:
        """Display a record."""
        from IPython.display import display

        name = uuid.uuid4().hex
        bundle = self.bundle(record, make)
        if WIDGET in bundle and not keep:
            with self._lock:
                self._displays.setdefault(record.path, []).append(name)
        display(bundle, raw=True, display_id=name)  # type: ignore[no-untyped-call]

    def settle(self, record: InFolder) -> None:
        """Replace the displays of a record that has ended by plain HTML, unless the user has something open there."""
        from IPython.display import display

        path = record.path
        with self._lock:
            panel, names = self._panels.get(path), list(self._displays.get(path, ()))
            if panel is None:
                return
            if panel.over:
                del self._panels[path]
                self._displays.pop(path, None)
        if panel.in_use:
            return
        try:
            for name in names:
                display(to_bundle(self._doc(record)), raw=True, display_id=name, update=True)  # type: ignore[no-untyped-call]
        except Exception:  # thread boundary: the widgets stay as they are
            logger.exception("settling the display of %s", path)
