"""TensorBoard below a cell: a line, and a frame in a widget, so no saved notebook loads a port."""

from __future__ import annotations

import time
from typing import Any

from workbench.base.display_protocol import as_bundle
from workbench.client.tensorboard.board import Board, Way
from workbench.display.kit.line import show_bundle
from workbench.display.kit.live import has_widgets
from workbench.display.kit.templates import macro

_USABLE_S = 600.0  # a frame drawn later, as from a saved notebook, stays empty
_LATE = "Run the cell again."


def board_html(board: Board) -> str:
    """Draw the line, with a link if the Jupyter server serves the board, under any port."""
    link = board.url if board.route.way is Way.JUPYTER else ""
    draw_line = macro("board.html", "line")
    return str(draw_line(board.facts, link))


def show_board(board: Board) -> None:
    """Display the line and, if widgets are available, the page with a button to hide it."""
    show_bundle(as_bundle(board))
    if has_widgets():
        from IPython.display import display

        widget = frame_widget(board)
        button, _ = widget.children
        button.value = True
        display(widget)  # type: ignore[no-untyped-call]


def frame_widget(board: Board) -> Any:
    import ipywidgets as w

    button = w.ToggleButton(description="Show it here", icon="line-chart")
    frame = w.HTML()

    def toggle(_: object) -> None:
        if not button.value:
            frame.value = ""
        elif board.server.is_alive and board.server.answers:
            usable_until_ms = int((time.time() + _USABLE_S) * 1000)
            draw_page = macro("board.html", "page")
            draw_frame = macro("board.html", "frame")
            page = draw_page(board.url, usable_until_ms, _LATE)
            frame.value = str(draw_frame(page))
        else:
            frame.value = f"<p>TensorBoard has ended. {_LATE}</p>"

    button.observe(toggle, names="value")
    return w.VBox([button, frame])
