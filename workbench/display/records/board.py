"""TensorBoard below a cell: a line that says where it is, and its page in a frame."""

from __future__ import annotations

import html

from workbench.results.tensorboard.board import Board

__all__ = ["board_html"]

_HEIGHT_PX = 640
_SMALL = "color: var(--jp-ui-font-color2, inherit); margin: 0.5em 0; overflow-wrap: anywhere"
_FRAME = "border: 1px solid var(--jp-border-color2, #8884)"
# TensorBoard's page takes its theme from its URL. Of the two frames one is shown, and a lazy one that is not shown is
# not loaded. The ground is for the moment before the page has come.
_GROUNDS = {"light": "#fff", "dark": "#303030"}
_DARK = ('body[data-jp-theme-light="false"]', "body.vscode-dark")
_THEMES = "".join(
    f"{body} .wb-board-{theme} {{ display: {display} !important; }} "
    for body in _DARK
    for theme, display in (("light", "none"), ("dark", "inline"))
)


def board_html(board: Board) -> str:
    """Draw the line and the frames, one for each theme."""
    url = html.escape(board.url, quote=True)
    first, *rest = (html.escape(fact) for fact in board.facts)
    link = f'<a href="{url}" target="_blank" rel="noopener">open in a tab</a>'
    line = f'<p style="{_SMALL}">{" ".join([first, *rest])} {link}</p>'
    dark = f"{url}{'&amp;' if '?' in url else '?'}darkMode=true"
    frames = _frame("light", url) + _frame("dark", dark, "; display: none")
    return f"{line}{frames}<style>{_THEMES}</style>"


def _frame(theme: str, url: str, more: str = "") -> str:
    style = f"{_FRAME}; background: {_GROUNDS[theme]}{more}"
    return (
        f'<iframe class="wb-board-{theme}" src="{url}" title="TensorBoard" loading="lazy" width="100%" '
        f'height="{_HEIGHT_PX}" style="{style}"></iframe>'
    )
