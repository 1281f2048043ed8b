"""TensorBoard below a cell: a line that says where it is, and its page in a frame."""

from __future__ import annotations

from workbench.display.kit.templates import render
from workbench.results.tensorboard.board import Board

__all__ = ["board_html"]


def board_html(board: Board) -> str:
    """Draw the line and the frames, one for each theme."""
    return str(render("board.html", url=board.url, facts=board.facts))
