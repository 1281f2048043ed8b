"""The frame of the panels: `templates/sheet.css` confines every rule to `.wb`; colours are JupyterLab's if there."""

from __future__ import annotations

from markupsafe import Markup

from workbench.display.kit.templates import render

_BAD = "var(--jp-error-color1, #d32f2f)"

STATE_COLOURS = {
    "succeeded": "var(--jp-success-color1, #2e7d32)",
    "failed": _BAD,
    "lost": _BAD,
    "cancelled": "var(--jp-warn-color1, #c77700)",
    "queued": "var(--jp-ui-font-color3, #888)",
}
"""The colour of a run's state; any other state is busy."""
_BUSY = "var(--jp-brand-color1, #1976d2)"


def styled(content: str, state: str = "", *, full: bool = False) -> str:
    """Put HTML into the frame that the style sheet speaks of, the sheet with it."""
    return _frame(content, state, full=full, sheet=True)


def framed(content: str, state: str = "", *, full: bool = False) -> str:
    """Do the same without the sheet, for a page that has it."""
    return _frame(content, state, full=full, sheet=False)


def _frame(content: str, state: str, *, full: bool, sheet: bool) -> str:
    colour = STATE_COLOURS.get(state, _BUSY)
    return str(render("frame.html", content=Markup(content), colour=colour, full=full, sheet=sheet))
