"""How the line of each technique looks, and names beside the ends of lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.display.kit.plots.figure import FOREGROUND, Look, Series, look
from workbench.jobs.choices import Technique

_NAMES = tuple(str(technique) for technique in Technique)
_LABEL_SHARE = 0.075  # of the plot's height, that one label takes
_NEAR = 0.1  # of the plot's width: a line that ends nearer to the right side is joined to its label


def look_of(technique: str, dash: str = "-") -> Look:
    """Return the look of a technique, with a dash that says something else."""
    name = technique.partition(" ")[0]
    return replace(look(_NAMES.index(name) if name in _NAMES else len(_NAMES)), dash=dash)


def apart(wanted: Sequence[float], least: float) -> list[float]:
    """Move values apart until none is nearer than `least` to the next; those that are far enough stay.

    Example:
        >>> [round(y, 2) for y in apart([1.0, 1.1, 5.0], 0.5)]
        [0.8, 1.3, 5.0]
    """
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    blocks: list[tuple[float, list[int]]] = []  # middle, and who shares it
    for n in order:
        middle, members = wanted[n], [n]
        while blocks and middle - least * (len(members) - 1) / 2 < (
            blocks[-1][0] + least * (len(blocks[-1][1]) - 1) / 2 + least
        ):
            before, others = blocks.pop()
            middle = (before * len(others) + middle * len(members)) / (len(others) + len(members))
            members = others + members
        blocks.append((middle, members))
    places = [0.0] * len(wanted)
    for middle, members in blocks:
        for place, n in enumerate(members):
            places[n] = middle + least * (place - (len(members) - 1) / 2)
    return places


def write_labels(axes: Any, lines: Sequence[Series], axis: str, top: float, bottom: float = 0.0) -> None:
    """Write each line's name to the right, with a piece of the line, near where it ends and apart from each other."""
    left, right = axes.get_xlim()
    axes.set_xlim(left, right)  # what stands beside the axes must not widen them
    span = right - left
    places = apart([one.ys[-1] for one in lines], _LABEL_SHARE * (top - bottom))
    lift = max(0.0, bottom - min(places, default=0.0))
    for one, place in zip(lines, places, strict=True):
        at, x, y = place + lift, one.xs[axis][-1], one.ys[-1]
        if x > right - _NEAR * span:  # from far away such a line would look like data
            axes.plot(  # level up to the side: slanted from where lines end, they would cross
                [x, right, right + 0.02 * span], [y, y, at], color=one.look.colour, linewidth=0.7, alpha=0.6,
                clip_on=False,
            )  # fmt: skip
        axes.plot(
            [right + 0.03 * span, right + 0.055 * span, right + 0.08 * span], [at] * 3, color=one.look.colour,
            linewidth=1.4, linestyle=one.look.dash, marker=one.look.marker or None, markevery=[1], markersize=4,
            clip_on=False,
        )  # fmt: skip
        name = axes.text(right + 0.1 * span, at, f"{one.name} {one.end}".strip(), va="center", color=FOREGROUND)
        name.set_parse_math(False)
