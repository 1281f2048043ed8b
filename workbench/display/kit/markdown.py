"""Markdown in which every letter of foreign text stands for itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.base.table import Bar, Cell, Grid, Marked, cell_text
from workbench.base.words import plain
from workbench.display.kit.logs import clean


def escape(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|~#&$])", r"\\\1", plain(text))


def code(text: str) -> str:
    fence = "`" * (1 + _longest_fence(text))
    return f"{fence} {plain(text)} {fence}" if "`" in text else f"`{plain(text)}`"


def fenced(text: str) -> str:
    fence = "`" * max(3, 1 + _longest_fence(text))
    return f"{fence}\n{clean(text)}\n{fence}"


def table(grid: Grid) -> str:
    r"""Write a table, its caption above it.

    Example:
        >>> print(table(Grid(columns=("pod", "GiB"), rows=[("a|b", "1.5")], right={"GiB"})))
        | pod | GiB |
        | --- | ---: |
        | a\|b | 1.5 |
    """
    sides = ["---:" if title in grid.right else "---" for title in grid.columns]
    lines = [_line(map(_cell, grid.columns)), _line(sides), *(_line(map(_cell, row)) for row in grid.rows)]
    caption = [f"**{escape(grid.caption)}**", ""] if grid.caption else []
    return "\n".join([*caption, *lines])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    match cell:
        case Marked(parts):
            return escape(" ".join(text for text, _ in parts)) or " "
        case Bar():
            return code(cell_text(cell))
    return escape(cell) or " "


def _longest_fence(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
