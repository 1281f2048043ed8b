"""Values under the pointer in a static plot: a band for each place along x, whose words its own rule shows; no script.

A picture that goes on and one that is saved answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from workbench.base.words import number
from workbench.display.kit.plots.figure import STEP, Plot, Series

_BANDS = 48  # of lines with more points, about so many are told; markers are told all
_LINE_PT = 10.5
_GAP_PT = 5


def pointer_svg(axes: Any, plot: Plot, axis: str) -> Markup:
    """Draw what is seen only under the pointer, in the coordinates of the SVG that the axes were drawn to."""
    series = [one for one in plot.series if one.look.marker and one.ys]
    xs = _places(series, axis)
    left, bottom, right, top = axes.bbox.extents
    height = axes.figure.bbox.height
    at = [float(axes.transData.transform((x, 0.0))[0]) for x in xs]
    edges = [left - _GAP_PT, *((a + b) / 2 for a, b in pairwise(at)), right + _GAP_PT]
    limits = [float("-inf"), *((a + b) / 2 for a, b in pairwise(xs)), float("inf")]
    bands = Markup("")
    for n, x in enumerate(xs):
        lines = [_x_words(axis, x), *_values(series, axis, x, limits[n], limits[n + 1])]
        side, anchor = (_GAP_PT, "start") if at[n] < (left + right) / 2 else (-_GAP_PT, "end")
        words = Markup("").join(Markup('<tspan x="{}" dy="{}">{}</tspan>').format(side, _LINE_PT, it) for it in lines)
        bands += Markup(
            '<g class="wb-at"><rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
            '<g visibility="hidden" transform="translate({:.1f} {:.1f})"><path d="M0 0V{:.1f}"/>'
            '<text text-anchor="{}">{}</text></g></g>'
        ).format(
            edges[n], height - top, edges[n + 1] - edges[n], top - bottom, at[n], height - top, top - bottom, anchor,
            words,
        )  # fmt: skip
    style = 'fill="none" stroke="none" pointer-events="all" font-size="8.5" aria-hidden="true"'
    return Markup("<g {}>{}</g>").format(Markup(style), bands)


def _places(series: Sequence[Series], axis: str) -> list[float]:
    curves = sorted({x for one in series if one.joined for x in one.xs[axis]})
    every = max(1, -(-len(curves) // _BANDS))
    picked = {*curves[::every], *curves[-1:]}
    return sorted(picked | {x for one in series if not one.joined for x in one.xs[axis]})


def _values(series: Sequence[Series], axis: str, x: float, low: float, high: float) -> list[str]:
    """Return what each line is at the nearest of its points within a band."""
    words = []
    for one in series:
        within = [(abs(at - x), y) for at, y in zip(one.xs[axis], one.ys, strict=True) if low <= at <= high]
        if within:
            words.append(f"{one.name} {number(min(within)[1])}")
    return words


def _x_words(axis: str, x: float) -> str:
    if axis == STEP:
        return f"step {x:,.0f}"
    return f"{number(x)} {axis.partition(' since ')[0]}"
