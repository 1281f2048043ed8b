"""Put a run or a cluster before the user's eyes: widgets where there are any, else HTML, else text.

Live objects come as widgets, which a saved notebook cannot show again; so what was displayed is replaced by plain HTML
once there is nothing live about it any more.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.display.runview import run_page, run_text
from workbench.runs.view import RunView

if TYPE_CHECKING:
    from workbench.display.panel import RunPanel
    from workbench.runs.run import Run

__all__ = ["has_widgets", "run_bundle", "show_run"]

logger = logging.getLogger(__name__)
_WIDGET = "application/vnd.jupyter.widget-view+json"
_panels: dict[Path, RunPanel] = {}
_displays: dict[Path, list[str]] = {}
_lock = threading.Lock()


def has_widgets() -> bool:
    """Tell whether this process is a notebook's kernel and can make widgets."""
    if importlib.util.find_spec("ipywidgets") is None or importlib.util.find_spec("ipykernel") is None:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


def run_bundle(run: Run, *, live: bool | None = None) -> dict[str, object]:
    """Give a run as a display bundle: text and HTML always, the panel where it makes sense.

    Args:
        run: The run.
        live: Whether to add the panel. Default None: where there are widgets and the run has not ended.
    """
    view = RunView(run.path)
    bundle: dict[str, object] = {"text/plain": run_text(view), "text/html": run_page(view)}
    if live if live is not None else has_widgets() and not view.state.is_terminal:
        panel = _panel(run)
        bundle[_WIDGET] = {"version_major": 2, "version_minor": 0, "model_id": panel.widget.model_id}
    return bundle


def show_run(run: Run, *, live: bool | None = None) -> None:
    """Display a run; its panel turns into plain HTML when the run has ended.

    Args:
        run: The run.
        live: As for `run_bundle`; True gives a finished run its buttons too, and keeps them.
    """
    from IPython.display import display

    bundle = run_bundle(run, live=live)
    name = uuid.uuid4().hex
    if _WIDGET in bundle and live is None:
        with _lock:
            _displays.setdefault(run.path, []).append(name)
    display(bundle, raw=True, display_id=name)  # type: ignore[no-untyped-call]


def _panel(run: Run) -> RunPanel:
    """Give the one panel of a run, made and started when first asked for."""
    from workbench.display.panel import RunPanel

    with _lock:
        known = _panels.get(run.path)
        if known is None:
            known = _panels[run.path] = RunPanel(run, ended=_settle)
    return known.start()


def _settle(panel: RunPanel) -> None:
    """Replace the displays of a panel by plain HTML, unless the user has something open in it."""
    from IPython.display import display

    path = panel.view.run.path
    with _lock:
        names = list(_displays.get(path, ()))
        if panel.over:
            _panels.pop(path, None)
            _displays.pop(path, None)
    if panel.buttons.showing:
        return
    try:
        view = RunView(path)
        for name in names:
            bundle = {"text/plain": run_text(view), "text/html": run_page(view)}
            display(bundle, raw=True, display_id=name, update=True)  # type: ignore[no-untyped-call]
    except Exception:  # the border of the panel's thread: the widget stays as it is
        logger.exception("settling the display of %s", path)
